"""`python -m m40llm`: the command line."""

from m40llm.cli import main

main()
