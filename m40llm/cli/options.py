"""Flags that several commands share, and the frozen options that they become. Each flag has an M40LLM_* variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from m40llm.config import RuntimeOptions, SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")

_RUNTIME = (
    click.option(
        "--threads",
        "-t",
        type=int,
        envvar="M40LLM_THREADS",
        show_envvar=True,
        help="CPU threads (default: all; fewer where other programs need the cores, since threads wait for each other).",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(["f16", "f32"]),
        default="f16",
        envvar="M40LLM_KV_DTYPE",
        show_envvar=True,
        show_default=True,
        help="Precision of the KV cache.",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu", "emulator"]),
        default="auto",
        envvar="M40LLM_DEVICE",
        show_envvar=True,
        show_default=True,
        help="Where to compute; auto: a usable card, else the CPU. The emulator runs the CUDA kernels on the CPU, slowly.",
    ),
    click.option(
        "--require-sm52",
        is_flag=True,
        envvar="M40LLM_REQUIRE_SM52",
        show_envvar=True,
        help="Refuse every card but one of compute capability 5.2 (Tesla M40).",
    ),
    click.option(
        "--decode-graph/--no-decode-graph",
        default=False,
        envvar="M40LLM_DECODE_GRAPH",
        show_envvar=True,
        help="Replay decode steps as CUDA graphs.",
    ),
    click.option(
        "--cache-experiment",
        type=click.Choice(["off", "ldg", "ldg_kv"]),
        default="off",
        envvar="M40LLM_CACHE_EXPERIMENT",
        show_envvar=True,
        show_default=True,
        help="Load norms (ldg) or K and V (ldg_kv) through the card's read-only cache.",
    ),
    click.option(
        "--decode-graph-diag-sync",
        is_flag=True,
        envvar="M40LLM_DECODE_GRAPH_DIAG_SYNC",
        show_envvar=True,
        help="Time every replay of a CUDA graph; costs a wait.",
    ),
    click.option(
        "--projection-backend",
        type=click.Choice(["auto", "fast-fits", "large-model"]),
        default="auto",
        envvar="M40LLM_PROJECTION_BACKEND",
        show_envvar=True,
        show_default=True,
        help="On a card: FP32 copies of the weights for long prompts (fast-fits), compact weights only (large-model), or "
        "what fits into its memory (auto).",
    ),
    click.option(
        "--materialize-budget-mb",
        type=int,
        envvar="M40LLM_FAST_FITS_BUDGET_MB",
        show_envvar=True,
        help="MiB for those FP32 copies (default: what is free).",
    ),
    click.option(
        "--cublas/--no-cublas",
        default=True,
        envvar="M40LLM_ENABLE_CUBLAS",
        show_envvar=True,
        help="Whether cuBLAS or our own kernel multiplies by the FP32 copies (default: cuBLAS).",
    ),
    click.option(
        "--launch-log",
        is_flag=True,
        envvar="M40LLM_LAUNCH_LOG",
        show_envvar=True,
        help="Log each step's launches, by group of operations.",
    ),
    click.option(
        "--sync-log",
        is_flag=True,
        envvar="M40LLM_SYNC_LOG",
        show_envvar=True,
        help="Log each step's waits and copies, by group of operations.",
    ),
    click.option(
        "--alloc-log",
        is_flag=True,
        envvar="M40LLM_ALLOC_LOG",
        show_envvar=True,
        help="Log each step's allocations, and those of loading.",
    ),
    click.option(
        "--cpu-isa",
        default="auto",
        envvar="M40LLM_CPU_ISA",
        show_envvar=True,
        show_default=True,
        help="Instruction set of the CPU kernels.",
    ),
    click.option(
        "--activation-bits",
        type=click.Choice(["16", "32"]),
        envvar="M40LLM_ACTIVATION_BITS",
        show_envvar=True,
        help="Precision of activations in CPU projections; 32 takes twice the work (default: 16, with --kv-dtype f32: 32).",
    ),
    click.option(
        "--token-budget",
        type=int,
        default=512,
        envvar="M40LLM_TOKEN_BUDGET",
        show_envvar=True,
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
    ctx = click.option("--ctx", type=int, envvar="M40LLM_CTX", show_envvar=True, help=ctx_help)
    for option in (*reversed(_RUNTIME), ctx):
        command = option(command)
    return command


def sampling_options(command: _Command) -> _Command:
    """Adds the flags of `SamplingParams`; see `sampling_from`."""
    for option in reversed(_SAMPLING):
        command = option(command)
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
