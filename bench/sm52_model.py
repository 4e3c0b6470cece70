"""The kernels' machine code for sm_52 against the card's throughput: who waits for instructions, and predicted tokens per second.

    python bench/sm52_model.py                 # issue over memory time of every kernel, speed of well-known models
    python bench/sm52_model.py --check         # fails where a target of docs/perf_baselines.md is missed
    python bench/sm52_model.py --write         # renews m40llm/device/data/sm52_costs.json after a kernel has changed

Every kernel is compiled for sm_52 and one warp of it is walked through the machine code (warp_walk.py), at two lengths of its inner
loop, with the grids and arguments that the real launchers make: that gives what a warp executes once and per step. Nothing here
was measured on a card; m40llm/device/roofline.py has the time model and its error. Without --write the package's table is read, and
no disassembler is needed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from nvdisasm import Function, disassemble, find_nvdisasm
from shapes import SHAPES, ModelShape
from warp_walk import PARAMETERS_AT, Launch, Walked, walk

from m40llm.device import nvrtc
from m40llm.device.buffers import DevicePointer
from m40llm.device.compile_all import BuiltKernel, compile_module
from m40llm.device.recording import RecordedLaunch, RecordingDevice
from m40llm.device.roofline import (
    CARDS,
    CLASSES,
    COSTS_FILE,
    ERROR_NOTE,
    Cycles,
    KernelCost,
    load_costs,
    source_digest,
    stale_modules,
    to_json,
)
from m40llm.device.sources import kernel_modules, kernel_source
from m40llm.gguf import TensorType
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda import attention, project
from m40llm.ops.cuda.dry_run import DryOps
from m40llm.ops.cuda.launch_cost import COLUMNS, KEYS, cost_name
from m40llm.ops.cuda.pack import FORMATS, packed_bytes
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.prediction import Prediction, predict
from m40llm.weights import LayerWeights, ModelWeights

TYPES = tuple(dict.fromkeys(TensorType[fmt.ggml.name] for fmt in FORMATS.values()))
FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
STAGED_ROWS = 4  # up to which the producer of x may stage it
TARGET_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "F16")
# llama.cpp's kernels, walked in the same way on the same chips (K = 4096, one row): issue over memory time
LLAMA_CPP = {
    ("m40-24g", "Q8_0"): 0.92,
    ("m40-24g", "Q4_0"): 1.48,
    ("m40-24g", "Q4_K"): 1.89,
    ("m40-24g", "Q6_K"): 1.89,
    ("p40", "Q8_0"): 0.49,
    ("p40", "Q4_0"): 0.75,
    ("p40", "Q4_K"): 1.03,
    ("p40", "Q6_K"): 0.96,
}
# llama.cpp or Ollama, decode in tokens per second: measured and published, or from the same model
LLAMA_CPP_DECODE = {
    ("m40-24g", "qwen2.5-3b-q8_0"): "40.8 (measured, Ollama)",
    ("m40-24g", "llama2-7b-q4_0"): "35 (modelled)",
    ("m40-24g", "llama3-8b-q8_0"): "22 (modelled)",
    ("p40", "llama2-7b-q4_0"): "56.8 (measured)",
}
# One row: issue at most half of the memory time from K = 2048 on; four rows: all of it
MOST_ISSUE = {1: 0.5, 4: 1.0}
LEAST_SPEED = {"decode": 60.0, "prefill": 500.0}  # of Qwen2.5-3B Q8_0 on an M40, context 512
TARGET_MODEL = "qwen2.5-3b-q8_0"

_CLASSES = {
    "full": "FADD FMUL FFMA FADD32I FMUL32I FFMA32I XMAD IADD IADD32I IADD3 LOP LOP32I LOP3 MOV MOV32I SEL PRMT",
    "half": "SHF SHL SHR BFE BFI ISCADD ISCADD32I LEA IMNMX FMNMX ISET FSET ISETP FSETP PSETP ICMP FCMP R2P P2R PSET CSET CSETP",
    "special": "I2F F2F F2I I2I MUFU POPC FLO RRO",
    "shuffle": "SHFL",
    "control": "BRA SSY SYNC EXIT BAR DEPBAR NOP MEMBAR S2R PBK BRK PCNT CONT CAL RET CS2R LDC VOTE TEXDEPBAR CCTL",
}
CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes.split()}
_MEMORY = {"LDS": "shared", "STS": "shared", "ATOMS": "shared"} | dict.fromkeys(
    ("LDG", "STG", "LDL", "STL", "LD", "ST", "ATOM", "RED"), "memory"
)


# ---- from machine code to costs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """What to walk: its name in the table, and its launch for a number of steps of its loop; `first` and `second` of them."""

    name: str
    launch: Callable[[int], RecordedLaunch]
    first: int
    second: int
    step: str


class Recorder:
    """Launches of the real launchers, on a device where nothing runs, and the integers that kernels read from memory."""

    def __init__(self) -> None:
        self.device = RecordingDevice()
        self._words: dict[int, int] = {}

    def tensor(self, name: str, *shape: int, dtype: type = np.float32) -> DeviceTensor:
        buffer = self.device.alloc(int(np.prod(shape)) * np.dtype(dtype).itemsize, name)
        return DeviceTensor.at(buffer, shape, dtype)

    def integers(self, tensor: DeviceTensor, *values: int) -> DeviceTensor:
        """Says what `tensor` holds."""
        self._words |= {tensor.memory.ptr + 4 * i: v for i, v in enumerate(values)}
        return tensor

    def word(self, address: int) -> int | None:
        return self._words.get(address)

    def last(self) -> RecordedLaunch:
        return self.device.launches[-1]


def projection(recorder: Recorder, kinds: tuple[TensorType, ...], rows: int) -> Callable[[int], RecordedLaunch]:
    """A launch of matrices of these types, the first of which is walked, K = steps × 1024."""

    def launch(steps: int) -> RecordedLaunch:
        columns = steps * COLUMNS
        ops = DryOps(recorder.device)
        matrices = [ops.matrix(f"{k.name}", k, 128, columns) for k in dict.fromkeys(kinds)]
        x = recorder.tensor("x", rows, columns)
        outs = [recorder.tensor("y", rows, 128) for _ in matrices]
        project.project(recorder.device, x, matrices, outs)
        return recorder.last()

    return launch


def decode_attention(recorder: Recorder, head_dim: int, group: int) -> Callable[[int], RecordedLaunch]:
    """One block for all keys: a step is one tile of each of its four warps."""
    return lambda steps: _attention(recorder, head_dim, group, 1, steps * 4 * KEYS)


def prefill_attention(recorder: Recorder, head_dim: int) -> Callable[[int], RecordedLaunch]:
    """The first tile of a segment of 64 tokens at the end of the keys; a step is a tile of 32 keys."""
    return lambda steps: _attention(recorder, head_dim, 4, 64, steps * KEYS)


def _attention(recorder: Recorder, head_dim: int, group: int, rows: int, keys: int) -> RecordedLaunch:
    shape = ModelShape("attention", "llama", 64, group, 1, head_dim, 64, 256, (), TensorType.F32, TensorType.F32)
    config = shape.config(1, keys)
    ops = DryOps(recorder.device)
    ws = ops.new_workspace(config, StepLimits(rows=rows, segments=1, logit_rows=1))
    kv = ops.new_kv(KVLayout.for_model(config, 1, keys, "f16"))
    plan = StepPlan.pack([Segment(0, keys - rows, [0] * rows)])
    for name in ("cu_seqlens_q", "kv_lens", "slots"):
        recorder.integers(ws.plan[name], *getattr(plan, name).tolist())
    if rows == 1:  # the launcher would give each block one tile of each warp: here one block has them all
        whole = attention.splits_for
        attention.splits_for = lambda *_: 1
        try:
            ops.attention(ws.q, kv, 0, plan.shape, config, ws, ws.attn)
        finally:
            attention.splits_for = whole
    else:
        ops.attention(ws.q, kv, 0, plan.shape, config, ws, ws.attn)
    return next(r for r in reversed(recorder.device.launches) if r.symbol.startswith("attention_"))


def staged(launch: Callable[[int], RecordedLaunch]) -> Callable[[int], RecordedLaunch]:
    """The same with an input that its producer has staged."""

    def with_staged(steps: int) -> RecordedLaunch:
        plain = launch(steps)
        return replace(plain, arguments={**plain.arguments, "staged": np.int32(1)})

    return with_staged


def projections(recorder: Recorder, kinds: tuple[TensorType, ...], module: str) -> Iterator[Subject]:
    """Of the first type of `kinds`, which one launch handles together: 1, 4 and 8 rows, plain and staged where that exists."""
    for rows in (1, 4, 8):
        launch = projection(recorder, kinds, rows)
        for is_staged in (False, True):
            if is_staged and (rows > STAGED_ROWS or kinds[0] in FLOATS):
                continue
            name = cost_name(f"{module}_r{rows}", module, kinds[0], is_staged)
            yield Subject(name, staged(launch) if is_staged else launch, 2, 12, "1024 columns")


def subjects(recorder: Recorder) -> Iterator[Subject]:
    for kind in TYPES:
        yield from projections(recorder, (kind,), f"project_{FORMATS[kind].name}")
        launch = projection(recorder, (kind,), project.GEMM_FROM_ROWS)
        yield Subject(f"gemm_{FORMATS[kind].name}", launch, 1, 2, "1024 columns")
    for names, kernel in project.MIXED.items():
        pair = tuple(TensorType[name.upper()] for name in sorted(names))
        for kinds in (pair, pair[::-1]):
            yield from projections(recorder, kinds, f"project_{kernel}")
    for head_dim in attention.HEAD_SIZES:
        for group in (1, 4, 8):
            name = f"attention_decode_hd{head_dim}_g{group}"
            yield Subject(name, decode_attention(recorder, head_dim, group), 1, 9, "128 keys of a block")
        yield Subject(f"attention_prefill_hd{head_dim}", prefill_attention(recorder, head_dim), 8, 24, "32 keys")


class Machine:
    """Compiled and disassembled modules for sm_52."""

    def __init__(self, nvdisasm: Path):
        self._nvdisasm = nvdisasm
        self._functions: dict[str, dict[str, Function]] = {}
        self._built: dict[str, dict[str, BuiltKernel]] = {}

    def function(self, launch: RecordedLaunch) -> Function:
        if launch.module not in self._functions:
            compiled = nvrtc.compile(kernel_source(launch.module), "sm_52")
            self._functions[launch.module] = disassemble(compiled.path, self._nvdisasm)
        return self._functions[launch.module][launch.symbol]

    def built(self, launch: RecordedLaunch) -> BuiltKernel:
        if launch.module not in self._built:
            self._built[launch.module] = {k.name: k for k in compile_module(launch.module, "sm_52")}
        return self._built[launch.module][launch.symbol]

    def walked(self, launch: RecordedLaunch, recorder: Recorder) -> Walked:
        place = Launch((0, 0, 0), (0, 0, 0), launch.block, launch.grid, _constants(launch))
        return walk(self.function(launch), place, recorder.word)


def _constants(launch: RecordedLaunch) -> dict[int, int]:
    """Bank 0 of constant memory: the arguments, aligned to their sizes, from PARAMETERS_AT on."""
    bank: dict[int, int] = {}
    at = PARAMETERS_AT
    for value in launch.arguments.values():
        if isinstance(value, np.generic):
            data = value.tobytes()
        else:
            data = (value.ptr if isinstance(value, DevicePointer) else 0).to_bytes(8, "little")
        at = -(-at // len(data)) * len(data)
        for i in range(0, len(data), 4):
            bank[at + i] = int.from_bytes(data[i : i + 4], "little")
        at += len(data)
    return bank


def by_class(walked: Walked) -> Counter[str]:
    """Warp instructions by class. Raises KeyError for an opcode that has none."""
    counts: Counter[str] = Counter()
    for (opcode, bits), count in walked.counts.items():
        name = f"{_MEMORY[opcode]}{max(32, bits)}" if opcode in _MEMORY else CLASS_OF[opcode]
        counts[name] += count
    return counts


def cost_of(subject: Subject, machine: Machine, recorder: Recorder) -> tuple[KernelCost, tuple[str, ...]]:
    """The cost, and the branches that were guessed."""
    first, second = subject.launch(subject.first), subject.launch(subject.second)
    walks = machine.walked(first, recorder), machine.walked(second, recorder)
    few, many = by_class(walks[0]), by_class(walks[1])
    per_step = {name: (many[name] - few[name]) / (subject.second - subject.first) for name in CLASSES}
    once = {name: few[name] - per_step[name] * subject.first for name in CLASSES}
    built = machine.built(first)
    if second.symbol != first.symbol or not subject.name.startswith(first.symbol):
        raise RuntimeError(f"{subject.name}: the launcher chose {first.symbol} and {second.symbol}")
    cost = KernelCost(
        module=first.module,
        step=subject.step,
        registers=built.registers,
        shared_bytes=built.shared_bytes,
        threads=built.threads,
        blocks_per_sm=built.blocks_per_sm,
        occupancy=round(built.occupancy, 4),
        once=once,
        per_step=per_step,
    )
    return cost, walks[1].guesses


def make_table(nvdisasm: Path) -> dict[str, KernelCost]:
    """Costs of every kernel, from the current sources."""
    machine, recorder, costs = Machine(nvdisasm), Recorder(), {}
    for subject in subjects(recorder):
        costs[subject.name], guesses = cost_of(subject, machine, recorder)
        if guesses:
            print(f"{subject.name}: guessed {', '.join(dict.fromkeys(guesses))}", file=sys.stderr)
    return costs


# ---- what follows from them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProjectionRow:
    """One projection kernel at one K, per weight of the matrix."""

    name: str
    kind: TensorType
    rows: int
    columns: int
    instructions: float
    cycles: Cycles  # multiprocessor cycles
    nbytes: float

    def share(self, card: str) -> float:
        """Time of the busiest unit over the time of the bytes at peak bandwidth."""
        chip = CARDS[card]
        return self.cycles.busiest / (chip.multiprocessors * chip.clock_hz) / (self.nbytes / chip.bandwidth)

    def issue_share(self, card: str) -> float:
        """The same of the schedulers alone."""
        return self.share(card) * self.cycles.issue / self.cycles.busiest

    @property
    def unit(self) -> str:
        return max(
            ("issue", "arithmetic", "special", "shared", "load"), key=lambda name: float(getattr(self.cycles, name))
        )


def projection_rows(costs: Mapping[str, KernelCost], columns: tuple[int, ...]) -> Iterator[ProjectionRow]:
    for kind in TYPES:
        for rows in (1, 4, 8):
            plain = f"project_{FORMATS[kind].name}_r{rows}"
            name = f"{plain}+staged" if f"{plain}+staged" in costs else plain  # as decode steps run it
            for k in columns:
                cycles = costs[name].warp(k / COLUMNS)
                weights = 4 * k  # of one warp: four rows
                yield ProjectionRow(
                    name=name,
                    kind=kind,
                    rows=rows,
                    columns=k,
                    instructions=cycles.issue * 4 * 32 / weights,
                    cycles=cycles * (1 / weights),
                    nbytes=packed_bytes(kind, 4, k) / weights,
                )


def model_weights(shape: ModelShape, context: int) -> tuple[int, Callable[[DryOps], ModelWeights]]:
    """(layers, weights for `predict`) of a shape: every layer, of its kind."""

    def make(ops: DryOps) -> ModelWeights:
        kinds = [kind for kind in shape.layers for _ in range(kind.count)]
        layers = []
        for i, kind in enumerate(kinds):
            m = {name: ops.matrix(f"blk.{i}.{name}", t, n, k) for name, t, n, k in shape.layer_matrices(kind)}
            biases = {
                f"attn_{part}_bias": ops.vector(f"blk.{i}.{part}", m[f"attn_{part}"].rows) if shape.biased else None
                for part in "qkv"
            }
            norms = {name: ops.vector(f"blk.{i}.{name}", shape.d) for name in ("attn_norm", "ffn_norm")}
            layers.append(LayerWeights(**m, **biases, **norms))
        table = ops.matrix("token_embd", shape.embedding, shape.v, shape.d)
        head = table if shape.tied else ops.matrix("output", shape.head, shape.v, shape.d)
        rope = ops.load_rope(shape.config(1, context), context)
        return ModelWeights(table, tuple(layers), ops.vector("output_norm", shape.d), head, rope)

    return shape.layer_count, make


def predicted(shape: ModelShape, card: str, context: int, slots: int, costs: Mapping[str, KernelCost]) -> Prediction:
    layers, make = model_weights(shape, context)
    config = shape.config(layers, context)
    return predict(config, make, CARDS[card], capacity=context, context=context, slots=slots, costs=costs)


def missed_targets(rows: list[ProjectionRow], target: Prediction) -> list[str]:
    missed = [
        f"{row.name}, K = {row.columns}: issues in {row.issue_share('m40-24g'):.0%} of the memory time on an M40, at most "
        f"{MOST_ISSUE[row.rows]:.0%}"
        for row in rows
        if row.kind.name in TARGET_TYPES
        and row.rows in MOST_ISSUE
        and row.issue_share("m40-24g") > MOST_ISSUE[row.rows]
    ]
    for what, least in LEAST_SPEED.items():
        speed = getattr(target, what).tokens_per_s
        if speed < least:
            missed.append(f"{TARGET_MODEL} on an M40: predicted {what} {speed:.1f} tok/s, at least {least:.0f}")
    return missed


# ---- the command ---------------------------------------------------------------------------------------------------------


def print_kernels(costs: Mapping[str, KernelCost], rows: list[ProjectionRow]) -> None:
    click.echo(
        "Projections: instructions per weight, multiprocessor cycles per byte of weights, busiest unit, and its time over the"
    )
    click.echo(
        "memory time (of the schedulers alone in parentheses); llama.cpp's kernels at K = 4096 beside, issue over memory.\n"
    )
    click.echo(
        f"{'kernel':<26} {'K':>6} {'regs':>4} {'occ.':>5} {'instr/w':>8} {'cyc/B':>7} {'busiest':<10} "
        f"{'M40':>13} {'P40':>13} {'llama.cpp':>12}"
    )
    for row in rows:
        cost = costs[row.name]
        peer = ""
        if row.rows == 1 and row.columns == 4096 and ("p40", row.kind.name) in LLAMA_CPP:
            peer = f"{LLAMA_CPP['m40-24g', row.kind.name]:.0%} / {LLAMA_CPP['p40', row.kind.name]:.0%}"
        m40, p40 = (f"{row.share(c):.0%} ({row.issue_share(c):.0%})" for c in ("m40-24g", "p40"))
        click.echo(
            f"{row.name:<26} {row.columns:>6} {cost.registers:>4} {cost.occupancy:>5.0%} {row.instructions:>8.2f} "
            f"{row.cycles.busiest / row.nbytes:>7.4f} {row.unit:<10} {m40:>13} {p40:>13} {peer:>12}"
        )
    click.echo("\nTiled projections and attention: cycles of a warp per step, by unit.\n")
    click.echo(
        f"{'kernel':<26} {'regs':>4} {'occ.':>5} {'step':<20} {'issue':>8} {'arithm.':>8} {'special':>8} {'shared':>8} {'load':>8}"
    )
    for name, cost in costs.items():
        if name.startswith("project_"):
            continue
        c = cost.warp(1) + cost.warp(0) * -1
        click.echo(
            f"{name:<26} {cost.registers:>4} {cost.occupancy:>5.0%} {cost.step:<20} {c.issue:>8.1f} {c.arithmetic:>8.1f} "
            f"{c.special:>8.1f} {c.shared:>8.1f} {c.load:>8.1f}"
        )


def print_speeds(names: tuple[str, ...], context: int, costs: Mapping[str, KernelCost]) -> None:
    click.echo(f"\nTokens per second at context {context}, prefill of 512 tokens. {ERROR_NOTE}.\n")
    click.echo(
        f"{'model':<22} {'card':<8} {'weights':>9} {'decode':>22} {'4 together':>22} {'prefill':>24}  llama.cpp decode"
    )
    for name in names:
        for card in ("m40-24g", "p40"):
            p = predicted(SHAPES[name], card, context, 4, costs)
            cells = [
                f"{s.tokens_per_s:.1f} ({s.low:.0f}-{s.high:.0f})" for s in (p.decode, p.decode_together, p.prefill)
            ]
            click.echo(
                f"{name:<22} {card:<8} {p.memory.weights / 2**30:>5.2f} GiB {cells[0]:>22} {cells[1]:>22} {cells[2]:>24}  "
                f"{LLAMA_CPP_DECODE.get((card, name), '')}"
            )


@click.command()
@click.option("--write", is_flag=True, help="Walk the kernels and renew the table of the package.")
@click.option("--check", is_flag=True, help="Exit with 1 where a target is missed.")
@click.option("--nvdisasm", type=click.Path(exists=True, path_type=Path), help="Default: the one of the triton wheel.")
@click.option("--context", type=click.IntRange(512, 1 << 17), default=512, show_default=True)
@click.option(
    "--columns", "columns", multiple=True, type=click.IntRange(256), default=(2048, 4096, 11008), show_default=True
)
def main(write: bool, check: bool, nvdisasm: Path | None, context: int, columns: tuple[int, ...]) -> None:
    """Instructions against bytes of every kernel, and predicted tokens per second."""
    if write:
        # before anything is compiled: a source that changes meanwhile leaves a table that is stale, not one that is wrong
        digests = {module: source_digest(module) for module in kernel_modules()}
        try:
            costs = make_table(nvdisasm or find_nvdisasm())
        except FileNotFoundError as error:
            raise click.ClickException(str(error)) from None
        sources = {cost.module: digests[cost.module] for cost in costs.values()}
        version = ".".join(map(str, nvrtc.for_arch("sm_52").version))
        note = {"made by": "bench/sm52_model.py --write", "compiler": f"NVRTC {version}", "counts": "warp instructions"}
        COSTS_FILE.write_text(to_json(sources, costs, note), encoding="utf-8")
        load_costs.cache_clear()
    elif stale := stale_modules():
        print(f"the table is older than {', '.join(stale)}: --write renews it", file=sys.stderr)
    costs = load_costs()
    rows = list(projection_rows(costs, columns))
    print_kernels(costs, rows)
    print_speeds(tuple(name for name in SHAPES if not name.startswith("tiny")), context, costs)
    missed = missed_targets(rows, predicted(SHAPES[TARGET_MODEL], "m40-24g", 512, 1, costs))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
