"""`m40llm inspect`: what is in a GGUF file, and what it needs to run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from m40llm.cli.errors import one_line
from m40llm.cli.model_arg import model_argument

if TYPE_CHECKING:
    from m40llm.gguf import GGUFFile, Metadata

_SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class TypeRow:
    """Tensors of one type: their number, weights and bytes."""

    type: str
    tensors: int
    weights: int
    bytes: int


@click.command(
    name="inspect",
    epilog="""\b
Examples:
  m40llm inspect smollm2
  m40llm inspect model.gguf --ctx 8192 --slots 4
  m40llm inspect model.gguf --tensors
  m40llm inspect model.gguf --json | jq .memory""",
)
@model_argument
@click.option("--ctx", type=click.IntRange(min=1), help="Plan memory for this context (default: the model's, ≤ 4096).")
@click.option("--slots", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences in flight.")
@click.option("--kv-dtype", type=click.Choice(["f16", "f32"]), default="f16", show_default=True)
@click.option("--tensors", "list_tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print one object: metadata, types, tensors, memory.")
def command(model: str, ctx: int | None, slots: int, kv_dtype: Any, list_tensors: bool, as_json: bool) -> None:
    """Metadata, tensor table by type, and the memory plan of a GGUF file."""
    from m40llm.cli.model_arg import resolve_model
    from m40llm.gguf import GGUFFile

    with GGUFFile.open(resolve_model(model)) as file:
        memory = _memory(file, ctx, slots, kv_dtype)
        rows = _by_type(file)
        if as_json:
            click.echo(json.dumps(_as_object(file, rows, memory), ensure_ascii=False))
        else:
            _print_report(file, rows, memory, list_tensors)


def _memory(file: GGUFFile, ctx: int | None, slots: int, kv_dtype: Any) -> dict[str, Any]:
    """Bytes by purpose for a context; {"unavailable": why} for a model that m40llm cannot run."""
    from m40llm.config import ConfigError, ModelConfig, RuntimeOptions
    from m40llm.gguf import GGUFError
    from m40llm.kv import KVLayout

    weights = sum(info.nbytes for info in file.tensors.values())
    try:
        config = ModelConfig.from_gguf(file)
    except (ConfigError, GGUFError) as err:
        return {"weights": weights, "unavailable": str(err)}
    options = RuntimeOptions(ctx=ctx, slots=slots, kv_dtype=kv_dtype)
    context = options.context_for(config)
    layout = KVLayout.for_model(config, slots, context, kv_dtype)
    return {
        "context": context,
        "slots": slots,
        "kv_dtype": kv_dtype,
        "weights": weights,
        "kv": layout.nbytes,
        "kv_per_token": layout.bytes_per_token,
        "total": weights + layout.nbytes,
    }


def _by_type(file: GGUFFile) -> list[TypeRow]:
    """One row per tensor type, most bytes first."""
    rows: dict[str, TypeRow] = {}
    for info in file.tensors.values():
        name = info.type.name
        old = rows.get(name, TypeRow(name, 0, 0, 0))
        weights = info.rows * info.columns
        rows[name] = TypeRow(name, old.tensors + 1, old.weights + weights, old.bytes + info.nbytes)
    return sorted(rows.values(), key=lambda row: -row.bytes)


def _value(metadata: Metadata, key: str) -> Any:
    """The value of `key`; of an array only what it holds, since vocabularies have hundreds of thousands of entries."""
    _, element = metadata.value_type(key)
    if element is None:
        return metadata[key]
    return f"[{metadata.array_length(key):,} × {element.name.lower()}]"


def _as_object(file: GGUFFile, rows: list[TypeRow], memory: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "metadata": {key: _value(file.metadata, key) for key in file.metadata},
        "types": [vars(row) for row in rows],
        "tensors": [
            {"name": t.name, "type": t.type.name, "shape": list(t.shape), "bytes": t.nbytes}
            for t in file.tensors.values()
        ],
        "memory": memory,
    }


def _print_report(file: GGUFFile, rows: list[TypeRow], memory: dict[str, Any], list_tensors: bool) -> None:
    click.echo(f"{file.path}: GGUF v{file.version}, {len(file.metadata)} keys, {len(file.tensors)} tensors\n")
    width = max((len(key) for key in file.metadata), default=0)
    for key in file.metadata:
        shown = one_line(str(_value(file.metadata, key)))
        click.echo(f"{one_line(key):<{width}}  {shown[:_SHOWN_CHARACTERS]}")
    click.echo(f"\n{'type':<8} {'tensors':>8} {'weights':>16} {'MiB':>10}")
    for row in rows:
        click.echo(f"{row.type:<8} {row.tensors:>8} {row.weights:>16,} {row.bytes / 2**20:>10,.1f}")
    if list_tensors:
        click.echo("")
        for info in file.tensors.values():
            click.echo(f"{one_line(info.name):<40} {info.type.name:<8} {' × '.join(map(str, info.shape))}")
    click.echo("\nmemory")
    click.echo(f"  weights       {memory['weights'] / 2**20:>10,.1f} MiB")
    if "unavailable" in memory:
        click.echo(f"  m40llm cannot run this model: {one_line(memory['unavailable'])}")
        return
    per_token = f"{memory['kv_per_token'] / 1024:,.1f} KiB a token"
    click.echo(
        f"  KV {memory['kv_dtype']}        {memory['kv'] / 2**20:>10,.1f} MiB  "
        f"({memory['slots']} × {memory['context']:,} tokens, {per_token})"
    )
    click.echo(f"  together      {memory['total'] / 2**20:>10,.1f} MiB  plus activations")
