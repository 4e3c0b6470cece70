"""`m40llm tokenize`: text to token ids, with the model's own vocabulary."""

from __future__ import annotations

import json

import click

from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import json_flag


@click.command(
    name="tokenize",
    epilog="""\b
Examples:
  m40llm tokenize smollm2 --text "Hello, world"
  m40llm tokenize smollm2 --text "<|im_end|>" --no-special --json
  m40llm tokenize smollm2 --file in.jsonl > out.jsonl

in.jsonl holds one {"text": …} a line; for each, {"ids": […]} comes out.""",
)
@model_argument
@click.option("--text", help="The text.")
@click.option("--file", "path", metavar="IN.jsonl", help="JSON lines with a text each; - is stdin.")
@click.option("--no-special", is_flag=True, help="Control tokens in the text are plain text.")
@click.option("--bos", is_flag=True, help="Put the model's BOS token first.")
@json_flag
def command(model: str, text: str | None, path: str | None, no_special: bool, bos: bool, as_json: bool) -> None:
    """Token ids of a text under MODEL's vocabulary: no BOS unless --bos, no chat template.

    Without --json, --text prints one token a line: its id and its text.
    """
    if (text is None) == (path is None):
        raise click.UsageError("give either --text or --file", click.get_current_context())
    from m40llm.cli.errors import CliError
    from m40llm.cli.lines import read_objects
    from m40llm.cli.model_arg import resolve_model
    from m40llm.gguf import GGUFFile
    from m40llm.text import Tokenizer

    with GGUFFile.open(resolve_model(model)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)

    def encode(value: str) -> list[int]:
        return tokenizer.encode(value, bos=bos, special=not no_special)

    if text is not None:
        ids = encode(text)
        if as_json:
            click.echo(json.dumps({"ids": ids}))
            return
        for token in ids:
            click.echo(f"{token:>8}  {tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r}")
        return
    assert path is not None
    for where, line in read_objects(path, "text"):
        if not isinstance(line["text"], str):
            raise CliError(f"{where}: 'text' must be a string")
        click.echo(json.dumps({"ids": encode(line["text"])}))
