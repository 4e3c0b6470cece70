"""Open a model: file → config, tokenizer, weights on the chosen device, a session ready for its first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any

from m40llm.config import ModelConfig, RuntimeOptions
from m40llm.device.choose import DeviceChoice, choose_device, open_device
from m40llm.gguf import GGUFFile
from m40llm.kv import KVLayout
from m40llm.kv.prefix_cache import CacheIdentity
from m40llm.ops.profile import StepLogs, StepProfile
from m40llm.ops.protocol import Ops
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.text import ChatTemplate, Tokenizer
from m40llm.weights import LoadProgress, check_tensors, load_weights

COMPILING = (
    "compiling kernels for this machine (each kind once, some seconds; cached afterwards)"  # for who gives an OnCompile
)
OnCompile = Callable[[str], None]  # called with a kernel's name before its first-ever compilation


@dataclass(frozen=True, slots=True)
class Model:
    """An open model. Owns the session; close it, or use it as a context manager."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    session: DecodeSession
    device: str  # "cpu", "cuda" or "emulator"
    device_reason: str  # one line: which device was chosen, and why
    description: str  # one line: device, kernels, KV
    load_s: float
    cache_identity: CacheIdentity  # what its keys and values depend on
    notes: tuple[str, ...] = ()  # lines for the user: what was decided for this model, and why
    profile: StepProfile | None = None  # with options.profile

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        options: RuntimeOptions,
        *,
        logit_rows: int | None = None,
        progress: LoadProgress | None = None,
        on_compile: OnCompile | None = None,
    ) -> Model:
        """Loads everything.

        Args:
            logit_rows: rows of a step that may ask for logits (default: one per slot).

        Raises:
            GGUFError, ConfigError, TokenizerError, ChatTemplateError: the file or an option is not usable, in one line.
            DeviceError: the device cannot be had (DeviceUnavailable) or cannot hold the model (OverBudget).
        """
        started = time.perf_counter()
        choice = choose_device(options.device, require_sm52=options.require_sm52)
        with GGUFFile.open(path) as file:
            config = ModelConfig.from_gguf(file)
            context = options.context_for(config)
            tokenizer = Tokenizer.from_gguf(file.metadata)
            template = ChatTemplate.from_gguf(file.metadata, options.chat_template)
            limits = StepLimits(
                rows=max(options.token_budget, options.slots),
                segments=options.slots,
                logit_rows=logit_rows or options.slots,
            )
            layout = KVLayout.for_model(config, options.slots, context, options.kv_dtype)
            check_tensors(file, config)
            identity = CacheIdentity.of(file, config, layout, f"{choice.kind} {options.resolved_activation_bits}")
            ops, notes, profile = _open_ops(choice, options, file, config, layout, limits, on_compile)
            try:
                weights = load_weights(file, config, ops, context, progress)
            except BaseException:
                ops.close()
                raise
            session = DecodeSession(
                config, weights, ops, slots=options.slots, context=context, kv_dtype=options.kv_dtype, limits=limits
            )
        kv = session.kv_layout
        description = (
            f"{ops.description}, KV {kv.dtype} {kv.n_slots} x {kv.context} tokens ({kv.nbytes / 2**20:.0f} MiB)"
        )
        load_s = time.perf_counter() - started
        return cls(
            config,
            tokenizer,
            template,
            session,
            choice.kind,
            choice.reason,
            description,
            load_s,
            identity,
            notes,
            profile,
        )

    def warm_up(self, before_step: Callable[[], None] | None = None) -> None:
        """Runs a step of each kind, so that no later one waits for a kernel to be compiled or loaded.

        `before_step` is called before each; what it raises ends the warm-up.

        Many rows, four, two and one have kernels of their own; so do as many rows of logits, whose matrix may be of another
        type; and so does a prompt that is read beside a decode. What is left in the slots counts as nothing.
        """
        limits = self.session.limits
        plans = []
        for count in (64, 4, 2, 1):
            rows = min(count, limits.rows, self.session.kv_layout.context)
            wanted = range(max(0, rows - limits.logit_rows), rows)
            plans.append([Segment(0, 0, [0] * rows, wanted)])
        if self.session.kv_layout.n_slots > 1 and limits.rows > 2:
            plans.append([Segment(0, 0, [0], (0,)), Segment(1, 0, [0, 0])])
        for plan in plans:
            if before_step is not None:
                before_step()
            self.session.run(StepPlan.pack(plan))

    def close(self) -> None:
        """Releases the session; may be called twice."""
        self.session.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_ops(
    choice: DeviceChoice,
    options: RuntimeOptions,
    file: GGUFFile,
    config: ModelConfig,
    layout: KVLayout,
    limits: StepLimits,
    on_compile: OnCompile | None,
) -> tuple[Ops, tuple[str, ...], StepProfile | None]:
    """The backend for the chosen device, notes for the user, the profile if one is kept. What the backend cannot run is
    refused before weights are read."""
    if choice.kind == "cpu":
        return _open_cpu(options, on_compile)
    from m40llm.ops.cuda import CudaOps, check_model, memory_plan, plan_projections
    from m40llm.ops.cuda.counted import CountedOps

    check_model(config, options.kv_dtype)
    device = open_device(choice, on_compile=on_compile)
    try:
        emulated = choice.kind == "emulator"
        memory = memory_plan(file, config, layout, limits)
        projections = plan_projections(file, config, options, limits, memory, device, emulated=emulated)
        projections.added_to(memory).check(device.memory_info()[0])
        settings: dict[str, Any] = {
            "decode_graph": options.decode_graph,
            "cache_experiment": options.cache_experiment,
            "projections": projections,
            "time_replays": options.decode_graph_diag_sync,
        }
        notes = (f"projections: {projections.reason}",)
        logs = StepLogs(options.launch_log, options.sync_log, options.alloc_log)
        if not (options.profile or logs.any):
            return CudaOps(device, **settings), notes, None
        counted = CountedOps(device, timed=options.profile, emulated=emulated, logs=logs, **settings)
        return counted, notes, counted.profile if options.profile else None
    except BaseException:
        device.close()
        raise


def _open_cpu(options: RuntimeOptions, on_compile: OnCompile | None) -> tuple[Ops, tuple[str, ...], StepProfile | None]:
    from m40llm.ops.cpu import CpuOps  # Numba takes a second to import; the other backends do without
    from m40llm.ops.cpu.profiled import ProfiledCpuOps

    unused = [
        flag
        for flag, given in (
            ("--projection-backend", options.projection_backend != "auto"),
            ("--materialize-budget-mb", options.materialize_budget_mb is not None),
            ("--no-cublas", not options.cublas),
            ("--cache-experiment", options.cache_experiment != "off"),
            ("--decode-graph", options.decode_graph),
            ("--decode-graph-diag-sync", options.decode_graph_diag_sync),
            ("--launch-log", options.launch_log),
            ("--sync-log", options.sync_log),
            ("--alloc-log", options.alloc_log),
        )
        if given
    ]
    notes = (f"without effect on the CPU: {', '.join(unused)}",) if unused else ()
    settings = (options.threads, options.cpu_isa, options.resolved_activation_bits, on_compile)
    if not options.profile:
        return CpuOps(*settings), notes, None
    profiled = ProfiledCpuOps(*settings)
    return profiled, notes, profiled.profile
