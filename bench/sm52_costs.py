"""What a warp of every kernel executes on sm_52, from the compiled kernels: once, and per step of its inner loop.

Every kernel is compiled and one warp of it is walked through the machine code, at two lengths of its inner loop, with the grids
and arguments that the real launchers make.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from nvdisasm import Function, disassemble
from shapes import ModelShape
from warp_walk import PARAMETERS_AT, Launch, Walked, walk

from m40llm.device import nvrtc
from m40llm.device.buffers import DevicePointer
from m40llm.device.compile_all import BuiltKernel, compile_module
from m40llm.device.recording import RecordedLaunch, RecordingDevice
from m40llm.device.roofline import CLASSES, KernelCost
from m40llm.device.sources import kernel_source
from m40llm.gguf import TensorType
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda import attention, project
from m40llm.ops.cuda.dry_run import DryOps
from m40llm.ops.cuda.launch_cost import COLUMNS, KEYS, cost_name
from m40llm.ops.cuda.pack import FORMATS
from m40llm.ops.cuda.staged import FLOATING, MIXED
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.plan import Segment, StepLimits, StepPlan

TYPES = tuple(dict.fromkeys(TensorType[fmt.ggml.name] for fmt in FORMATS.values()))

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
            if is_staged and FORMATS[kinds[0]].name in FLOATING:
                continue
            name = cost_name(f"{module}_r{rows}", module, kinds[0], is_staged)
            yield Subject(name, staged(launch) if is_staged else launch, 2, 12, "1024 columns")


def projection_kernels() -> Iterator[tuple[str, tuple[TensorType, ...]]]:
    """(module, types that it handles), once for each type, which comes first: modules of one type, then those of two."""
    for kind in TYPES:
        yield f"project_{FORMATS[kind].name}", (kind,)
    for names in MIXED:
        pair = tuple(TensorType[name.upper()] for name in names)
        for kinds in (pair, pair[::-1]):
            yield f"project_{'_'.join(names)}", kinds


def subjects(recorder: Recorder) -> Iterator[Subject]:
    for module, kinds in projection_kernels():
        yield from projections(recorder, kinds, module)
        if len(kinds) == 1:
            launch = projection(recorder, kinds, project.GEMM_FROM_ROWS)
            yield Subject(f"gemm_{FORMATS[kinds[0]].name}", launch, 1, 2, "1024 columns")
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
