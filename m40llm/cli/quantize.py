"""`m40llm quantize`: a copy of a model with its matrices in another type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from m40llm.cli.model_arg import model_argument


@click.command(
    name="quantize",
    epilog="""\b
Examples:
  m40llm quantize model-f16.gguf model-q8_0.gguf --type q8_0
  m40llm quantize smollm2 smollm2-f16.gguf --type f16

Vectors (norms, biases) become F32. Matrices that are quantised already are dequantised first: their error stays.""",
)
@model_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--type", "kind", type=click.Choice(["q8_0", "q4_0", "f16"]), required=True, help="Type of the matrices.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(model: str, out: Path, kind: Any, force: bool) -> None:
    """Write MODEL to OUT with its matrices as another tensor type.

    OUT appears whole or not at all; its path is printed.
    """
    from m40llm.cli.errors import CliError
    from m40llm.cli.model_arg import resolve_model
    from m40llm.cli.progress import StageBar
    from m40llm.gguf.quantize import quantize_file

    if out.exists() and not out.is_dir() and not force:
        raise CliError(f"{out}: exists; --force replaces it")
    source = resolve_model(model)
    with StageBar("quantizing", unit="bytes") as bar:
        path = quantize_file(source, out, kind, bar.update)
    print(f"{path.stat().st_size / 1e6:,.0f} MB", file=sys.stderr)
    click.echo(path)
