"""`m40llm plan`: what a model would take and do on a card, without one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import json_flag

if TYPE_CHECKING:
    from m40llm.config import ModelConfig
    from m40llm.prediction import Prediction, Speed

_CARDS = ("m40-24g", "m40-12g", "p40")  # device/roofline.py, which is not imported for --help
_MIB = 1 << 20
_SHORT = 512  # positions of the first decode figure, and tokens of the prompt


@click.command(
    name="plan",
    epilog="""\b
Examples:
  m40llm plan smollm2 --gpu m40-24g
  m40llm plan model.gguf --gpu p40 --ctx 8192 --slots 4
  m40llm plan qwen2.5-coder-1.5b --gpu m40-12g --json | jq .decode

Speeds come from counted instructions and bytes; no card was measured. Ratios are solid, absolute figures are good to
-25/+30 %. Exit code 1: the model does not fit.""",
)
@model_argument
@click.option(
    "--gpu", "card", type=click.Choice(_CARDS), default="m40-24g", show_default=True, help="Card to plan for."
)
@click.option("--ctx", type=click.IntRange(min=1), help="Context of each sequence (default: the model's, ≤ 4096).")
@click.option("--slots", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences in flight.")
@json_flag
def command(model: str, card: str, ctx: int | None, slots: int, as_json: bool) -> None:
    """Memory and predicted speed of a model on a card that need not be here."""
    from m40llm.cli.model_arg import resolve_model
    from m40llm.config import ModelConfig, RuntimeOptions
    from m40llm.device.roofline import CARDS
    from m40llm.gguf import GGUFFile
    from m40llm.ops.cuda import check_model
    from m40llm.prediction import predict, weights_of_file
    from m40llm.weights import check_tensors

    with GGUFFile.open(resolve_model(model)) as file:
        config = ModelConfig.from_gguf(file)
        check_model(config, "f16")
        check_tensors(file, config)
        options = RuntimeOptions(ctx=ctx, slots=slots)
        capacity = options.context_for(config)
        make = weights_of_file(file, config, capacity)
        short, full = (
            predict(
                config,
                make,
                CARDS[card],
                capacity=capacity,
                context=min(context, capacity),
                slots=slots,
                prompt=min(_SHORT, capacity),
                token_budget=options.token_budget,
            )
            for context in (_SHORT, capacity)
        )
    if as_json:
        click.echo(json.dumps(_as_object(short, full, capacity)))
    else:
        _print(config, short, full, capacity)
    if not short.fits:
        raise click.exceptions.Exit(1)


def _as_object(short: Prediction, full: Prediction, capacity: int) -> dict[str, Any]:
    from m40llm.device.roofline import ERROR, ERROR_NOTE

    return {
        "card": asdict(short.card),
        "context": capacity,
        "slots": short.slots,
        "memory": {**asdict(short.memory), "total": short.memory.total, "fits": short.fits},
        "error": {"low": ERROR[0], "high": ERROR[1], "note": ERROR_NOTE},
        "decode": {str(p.context): asdict(p.decode) for p in (short, full)},
        "decode_together": {str(p.context): asdict(p.decode_together) for p in (short, full)},
        "prefill": {"prompt": short.prompt, **asdict(short.prefill)},
    }


def _print(config: ModelConfig, short: Prediction, full: Prediction, capacity: int) -> None:
    from m40llm.device.roofline import ERROR_NOTE

    card, memory = short.card, short.memory
    click.echo(f"{config.name} on {card.name} ({card.bandwidth / 1e9:.0f} GB/s)\n\nmemory")
    click.echo(f"  weights       {memory.weights / _MIB:>10,.1f} MiB  packed, norms and RoPE table included")
    click.echo(f"  KV f16        {memory.kv / _MIB:>10,.1f} MiB  ({short.slots} × {capacity:,} tokens)")
    click.echo(f"  workspace     {memory.workspace / _MIB:>10,.1f} MiB")
    verdict = "fits" if short.fits else "does not fit: shorten --ctx, run fewer --slots, or take a smaller quantisation"
    click.echo(f"  together      {memory.total / _MIB:>10,.1f} MiB  of {card.memory / _MIB:,.0f}: {verdict}")
    room = card.memory - memory.total
    extra = "would fit too" if memory.materialised <= room else "would not fit"
    click.echo(
        f"  FP32 copies   {memory.materialised / _MIB:>10,.1f} MiB  more with --projection-backend fast-fits: {extra}"
    )
    click.echo(f"\nspeed ({ERROR_NOTE})")
    for p in dict.fromkeys((short, full)):
        _print_speed(f"decode at {p.context}", p.decode)
        if p.slots > 1:
            _print_speed(f"{p.slots} sequences at {p.context}", p.decode_together)
    _print_speed(f"prefill of {short.prompt}", short.prefill)


def _print_speed(what: str, speed: Speed) -> None:
    ms = speed.step
    click.echo(
        f"  {what:<22} {speed.tokens_per_s:>8.1f} tok/s ({speed.low:.0f}-{speed.high:.0f})  instructions {ms.issue * 1e3:.1f} ms, "
        f"memory {ms.memory * 1e3:.1f} ms, {speed.launches} launches {ms.launches * 1e3:.1f} ms"
    )
