"""The command line: one file per command, imported when it is asked for."""

from m40llm.cli.app import main

__all__ = ["main"]
