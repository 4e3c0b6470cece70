"""Flags that several commands share, and the frozen options that they become. Each flag has an M40LLM_* variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from m40llm.config import RuntimeOptions, SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def option(*names: str, **settings: Any) -> Any:
    """An option with a variable M40LLM_NAME, after its first long name unless `envvar` says otherwise."""
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = f"M40LLM_{long[2:].replace('-', '_').upper()}"
    return click.option(*names, **{"envvar": variable, "show_envvar": True, **settings})


_RUNTIME = (
    option(
        "--threads",
        "-t",
        type=int,
        help="CPU threads (default: all; fewer where other programs need the cores, since threads wait for each other).",
    ),
    option(
        "--kv-dtype",
        type=click.Choice(["f16", "f32"]),
        default="f16",
        show_default=True,
        help="Precision of the KV cache.",
    ),
    option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu", "emulator"]),
        default="auto",
        show_default=True,
        help="Where to compute; auto: a usable card, else the CPU. The emulator runs the CUDA kernels on the CPU, slowly.",
    ),
    option(
        "--require-sm52",
        is_flag=True,
        help="Refuse every card but one of compute capability 5.2 (Tesla M40).",
    ),
    option(
        "--decode-graph/--no-decode-graph",
        default=False,
        help="Replay decode steps as CUDA graphs.",
    ),
    option(
        "--cache-experiment",
        type=click.Choice(["off", "ldg", "ldg_kv"]),
        default="off",
        show_default=True,
        help="Load norms (ldg) or K and V (ldg_kv) through the card's read-only cache.",
    ),
    option(
        "--decode-graph-diag-sync",
        is_flag=True,
        help="Time every replay of a CUDA graph; costs a wait.",
    ),
    option(
        "--projection-backend",
        type=click.Choice(["auto", "fast-fits", "large-model"]),
        default="auto",
        show_default=True,
        help="On a card: FP32 copies of the weights for long prompts (fast-fits), compact weights only (large-model), or "
        "what fits into its memory (auto).",
    ),
    option(
        "--materialize-budget-mb",
        type=int,
        envvar="M40LLM_FAST_FITS_BUDGET_MB",
        help="MiB for those FP32 copies (default: what is free).",
    ),
    option(
        "--cublas/--no-cublas",
        default=True,
        envvar="M40LLM_ENABLE_CUBLAS",
        help="Whether cuBLAS or our own kernel multiplies by the FP32 copies (default: cuBLAS).",
    ),
    option(
        "--launch-log",
        is_flag=True,
        help="Log each step's launches, by group of operations.",
    ),
    option(
        "--sync-log",
        is_flag=True,
        help="Log each step's waits and copies, by group of operations.",
    ),
    option(
        "--alloc-log",
        is_flag=True,
        help="Log each step's allocations, and those of loading.",
    ),
    option(
        "--cpu-isa",
        default="auto",
        show_default=True,
        help="Instruction set of the CPU kernels.",
    ),
    option(
        "--activation-bits",
        type=click.Choice(["16", "32"]),
        help="Precision of activations in CPU projections; 32 takes twice the work (default: 16, with --kv-dtype f32: 32).",
    ),
    option(
        "--token-budget",
        type=int,
        default=512,
        show_default=True,
        help="Tokens per step: the size of prefill chunks.",
    ),
)

_SAMPLING = (
    click.option("--max-tokens", type=int, help="Stop after N tokens (default: when the context is full)."),
    click.option("--greedy", is_flag=True, help="Always take the most probable token (temperature 0)."),
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=40, show_default=True, help="Keep the K most probable tokens; 0: off."),
    click.option("--top-p", type=float, default=0.95, show_default=True, help="Keep probability mass P; 1: off."),
    click.option(
        "--min-p", type=float, default=0.05, show_default=True, help="Drop tokens below P × the best one's; 0: off."
    ),
    click.option(
        "--repeat-penalty", type=float, default=1.0, show_default=True, help="Divides repeated tokens; 1: off."
    ),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="Subtracted once seen."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="Subtracted per repetition."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit; repeatable."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
)


_ACTIVATION_BITS: dict[str | None, Literal[16, 32] | None] = {None: None, "16": 16, "32": 32}


def runtime_options(
    command: _Command, *, ctx_help: str = "Context in tokens (default: the model's, ≤ 4096)."
) -> _Command:
    """Adds the flags of `RuntimeOptions`; the command gets them as one dict, see `runtime_from`."""
    ctx = option("--ctx", type=int, help=ctx_help)
    for add in (*reversed(_RUNTIME), ctx):
        command = add(command)
    return command


def sampling_options(command: _Command) -> _Command:
    """Adds the flags of `SamplingParams`; see `sampling_from`."""
    for add in reversed(_SAMPLING):
        command = add(command)
    return command


def runtime_from(flags: dict[str, Any]) -> RuntimeOptions:
    """Takes the runtime flags out of `flags`. Raises click.UsageError for a value out of range."""
    from m40llm.config import ConfigError, RuntimeOptions

    on_card = ("require_sm52", "decode_graph", "decode_graph_diag_sync", "cache_experiment")
    projections = ("projection_backend", "materialize_budget_mb", "cublas")
    logs = ("launch_log", "sync_log", "alloc_log")
    names = ("threads", "ctx", "kv_dtype", "device", "cpu_isa", "token_budget", *on_card, *projections, *logs)
    bits = _ACTIVATION_BITS[flags.pop("activation_bits")]
    try:
        return RuntimeOptions(**{name: flags.pop(name) for name in names}, activation_bits=bits)
    except ConfigError as err:
        raise click.UsageError(str(err), click.get_current_context()) from err


def sampling_from(flags: dict[str, Any]) -> SamplingParams:
    """Takes the sampling flags out of `flags`. Raises click.UsageError for a value out of range."""
    from m40llm.config import ConfigError, SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "stop")
    values = {name: flags.pop(name) for name in (*names, "presence_penalty", "frequency_penalty")}
    if flags.pop("greedy"):
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values, logit_bias=tuple(_bias(text) for text in flags.pop("logit_bias")))
    except ConfigError as err:
        # the dataclass speaks of fields, the user of flags
        field, _, rest = str(err).partition(" ")
        shown = f"--{field.replace('_', '-')} {rest}" if field in values or field == "logit_bias" else str(err)
        raise click.UsageError(shown, click.get_current_context()) from err


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator:
            return int(token), float(bias)
    except ValueError:
        pass
    raise click.UsageError(f"--logit-bias {text!r}: write ID=BIAS, for example 198=-5", click.get_current_context())
