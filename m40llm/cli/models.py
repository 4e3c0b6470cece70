"""`m40llm models`: what can be fetched by alias, and what has been."""

from __future__ import annotations

import json

import click


@click.command(
    name="models",
    epilog="""\b
Examples:
  m40llm models
  m40llm models --json | jq -r '.[] | select(.path) | .path'""",
)
@click.option("--json", "as_json", is_flag=True, help="Print an array of alias, path (null until fetched), size, …")
def command(as_json: bool) -> None:
    """List the models that have an alias: size, licence, and the path once they are fetched."""
    from m40llm.cli.model_arg import offline_settings
    from m40llm.hub import local_path, registry

    settings = offline_settings()
    found = {alias: local_path(model, settings) for alias, model in registry().items()}
    if as_json:
        listed = [
            {
                "alias": alias,
                "path": None if found[alias] is None else str(found[alias]),
                "size": model.size,
                "sha256": model.sha256,
                "licence": model.licence,
                "licence_url": model.licence_url,
                "description": model.description,
            }
            for alias, model in registry().items()
        ]
        click.echo(json.dumps(listed, indent=2))
        return
    for alias, model in registry().items():
        click.echo(f"{alias:<20} {model.size / 1e6:>8,.0f} MB  {model.licence:<11} {model.description}")
        click.echo(f"{'':<20} {found[alias] or f'not fetched: m40llm pull {alias}'}")
