"""`m40llm COMMAND …`: finds the command's module, runs it, and turns every failure into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from m40llm.cli.errors import InterruptedByUserError, report

# command → one line for `m40llm --help`; the module m40llm.cli.COMMAND holds a click command named `command`
COMMANDS = {
    "generate": "Answer one prompt, streamed to stdout.",
    "chat": "A conversation in the terminal.",
    "serve": "Answer over HTTP: /generate and the OpenAI API.",
    "pull": "Fetch a model, by alias or from the Hugging Face hub.",
    "models": "List the models that have an alias.",
    "tokenize": "Text to token ids.",
    "score": "Log-probabilities of given token ids.",
    "perplexity": "How well a model predicts a text file.",
    "inspect": "Metadata, tensors and memory needs of a GGUF file.",
    "plan": "Memory and predicted speed of a model on a card that need not be here.",
    "quantize": "Convert a GGUF file to another tensor type.",
    "compile": "Compile the CUDA kernels ahead of time; registers, spills, occupancy.",
    "doctor": "What this machine can run on, and what would be chosen and why.",
}


class LazyGroup(click.Group):
    """Imports a command's module only when it runs: `m40llm --help` must not load Numba."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"m40llm.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as err:  # before click, which prints an empty line first
            raise InterruptedByUserError from err


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"m40llm {version('m40llm')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  m40llm generate smollm2 "What is the capital of France?"
  m40llm chat qwen2.5-coder-1.5b
  m40llm generate ./model.gguf - < prompt.txt > answer.txt

A MODEL is a path to a GGUF file, an alias (see `m40llm models`) or hf:OWNER/REPO/FILE.gguf; aliases and hub files
are fetched on first use. Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong
usage or input, 130 interrupted. M40LLM_DEBUG=1 shows tracebacks.""",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Print the version."
)
def group() -> None:
    """Run GGUF language models: on NVIDIA cards from Maxwell on, and on any CPU."""


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name); returns the exit code and never raises Exception."""
    try:
        result = group.main(args=None if argv is None else list(argv), prog_name="m40llm", standalone_mode=False)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, while it can still be reported
    except Exception as err:
        return report(err, debug=os.environ.get("M40LLM_DEBUG", "") not in ("", "0"))
    except KeyboardInterrupt:
        return report(InterruptedByUserError(), debug=False)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the `m40llm` script."""
    sys.exit(run())
