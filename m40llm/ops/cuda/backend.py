"""Projection backends: which matrices a model keeps twice, and who multiplies steps of many rows by them.

* `large-model`: weights stay compact; fused dequantise-and-multiply kernels for every row count.
* `fast-fits`: the layers' matrices also lie on the device in FP32; steps of GEMM_FROM_ROWS rows and more multiply by those.
  With cuBLAS by `Device.gemm` on plain rows, without it by our own GEMM on packed rows (for comparison: same bytes, other
  kernel). Fewer rows read the compact weights either way: they are what memory bandwidth is spent on.
* `auto`: `fast-fits` if everything fits into what is free, else `large-model`; says why.

The output projection is never kept twice: its rows are the few that want logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from m40llm.config import ModelConfig, RuntimeOptions
from m40llm.device.errors import DeviceUnavailable
from m40llm.device.protocol import Device
from m40llm.gguf import GGUFFile, TensorType
from m40llm.ops.cuda import embed, pack, project, tensor
from m40llm.ops.cuda.bias import spread_bias
from m40llm.ops.cuda.memory import MemoryPlan
from m40llm.ops.cuda.norm import swiglu
from m40llm.ops.cuda.pack import CudaMatrix
from m40llm.ops.cuda.project import GEMM_FROM_ROWS
from m40llm.ops.cuda.staged import Staged
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.plan import StepLimits

log = logging.getLogger(__name__)

_MIB = 1 << 20
# Left free beside materialised weights: cuBLAS' handle and kernels, and small scratch that no plan counts.
RESERVE_BYTES = 256 * _MIB


@dataclass(frozen=True, slots=True)
class ProjectionPlan:
    """What was decided. `materialised` are names of matrices, `nbytes` their FP32 copies, `scratch` (T, F) f32 for up."""

    backend: Literal["fast-fits", "large-model"]
    reason: str
    cublas: bool = False
    materialised: frozenset[str] = frozenset()
    nbytes: int = 0
    scratch: int = 0

    def added_to(self, memory: MemoryPlan) -> MemoryPlan:
        """The memory plan with what this one takes on top."""
        return replace(memory, materialised=self.nbytes, workspace=memory.workspace + self.scratch)


LARGE_MODEL = ProjectionPlan("large-model", "weights stay compact")


def plan_projections(
    file: GGUFFile,
    config: ModelConfig,
    options: RuntimeOptions,
    limits: StepLimits,
    memory: MemoryPlan,
    device: Device,
    *,
    emulated: bool,
) -> ProjectionPlan:
    """Resolves `--projection-backend` for one model on one device, before anything is allocated.

    Args:
        memory: the plan without materialised weights.
        emulated: whether the device is the emulator, where dequantising takes longer than it can save.

    Raises:
        DeviceUnavailable: fast-fits is asked for, and cuBLAS is missing.
    """
    if options.projection_backend == "large-model":
        return ProjectionPlan("large-model", "large-model, as asked: weights stay compact")
    estimate = _Estimate(
        groups=_groups(file, config, options.cublas),
        memory=memory,
        scratch=4 * limits.rows * config.d_ff if options.cublas else 0,
        free=device.memory_info()[0],
        budget=None if options.materialize_budget_mb is None else options.materialize_budget_mb * _MIB,
    )
    if options.projection_backend == "fast-fits":
        if options.cublas:
            _require_cublas(device)
        return _as_much_as_fits(estimate, options.cublas)
    against = _reason_against(estimate, options, limits, emulated)
    if against is None:
        try:
            _require_cublas(device)
        except DeviceUnavailable as error:
            against = error.reason
    if against is not None:
        return ProjectionPlan("large-model", f"large-model (auto), since {against}")
    reason = f"fast-fits (auto), since {estimate.sum} MiB fit into {_mib(estimate.free)} MiB free"
    names = frozenset(name for members, _ in estimate.groups for name in members)
    return ProjectionPlan("fast-fits", reason, True, names, estimate.wanted, estimate.scratch)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Bytes. `groups` are (names, bytes in FP32) of what is materialised together, `budget` the user's (None: none)."""

    groups: Sequence[tuple[tuple[str, ...], int]]
    memory: MemoryPlan
    scratch: int
    free: int
    budget: int | None

    @property
    def wanted(self) -> int:
        return sum(nbytes for _, nbytes in self.groups)

    @property
    def room(self) -> int:
        return self.free - self.memory.total - self.scratch - RESERVE_BYTES

    @property
    def sum(self) -> str:
        memory = self.memory
        return (
            f"weights {_mib(memory.weights)} + FP32 copies {_mib(self.wanted)} + workspace "
            f"{_mib(memory.workspace + self.scratch)} + KV {_mib(memory.kv)}"
        )


def _as_much_as_fits(estimate: _Estimate, cublas: bool) -> ProjectionPlan:
    """fast-fits, as asked for: in the order of layers, what the budget holds."""
    room, budget = estimate.room, estimate.budget
    available = max(0, room if budget is None else min(room, budget))
    names: list[str] = []
    taken = 0
    for members, nbytes in estimate.groups:
        if taken + nbytes <= available:
            names += members
            taken += nbytes
    total = sum(len(members) for members, _ in estimate.groups)
    how = "cuBLAS" if cublas else "our own GEMM"
    reason = f"fast-fits, as asked: {len(names)} of {total} matrices in FP32 ({_mib(taken)} MiB) for {how}"
    if len(names) < total:
        limit = "--materialize-budget-mb" if budget is not None and budget <= room else "the memory that is free"
        left = f"{total - len(names)} matrices stay compact: {_mib(estimate.wanted)} MiB would be over {limit}"
        log.warning("fast-fits: %s (%d MiB)", left, _mib(available))
        reason += f"; {left}"
    return ProjectionPlan("fast-fits", reason, cublas, frozenset(names), taken, estimate.scratch if names else 0)


def _reason_against(estimate: _Estimate, options: RuntimeOptions, limits: StepLimits, emulated: bool) -> str | None:
    """Why `auto` keeps weights compact. All or nothing: half a model in FP32 takes memory for half of the gain."""
    wanted, budget = estimate.wanted, estimate.budget
    if not options.cublas:
        return "cuBLAS is off, and FP32 weights would gain nothing without it"
    if emulated:
        return "the emulator dequantises more slowly than it multiplies"
    if limits.rows < GEMM_FROM_ROWS:
        return f"no step has more than {limits.rows} rows; cuBLAS is for {GEMM_FROM_ROWS} and more"
    if budget is not None and wanted > budget:
        return f"FP32 copies of {_mib(wanted)} MiB are over --materialize-budget-mb {_mib(budget)}"
    if wanted > estimate.room:
        reserve = f"a reserve of {_mib(RESERVE_BYTES)} MiB"
        return f"{estimate.sum} MiB and {reserve} do not fit into {_mib(estimate.free)} MiB free"
    return None


def _groups(file: GGUFFile, config: ModelConfig, cublas: bool) -> list[tuple[tuple[str, ...], int]]:
    """(names, bytes in FP32) of the matrices that are materialised together: gate and up of a layer share one output."""

    def nbytes(name: str) -> int:
        info = file.tensor(name)
        return 4 * info.rows * info.columns if cublas else pack.packed_bytes(TensorType.F32, info.rows, info.columns)

    parts = (("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
    names = [tuple(f"blk.{i}.{part}.weight" for part in group) for i in range(config.n_layers) for group in parts]
    return [(members, sum(map(nbytes, members))) for members in names]


def _require_cublas(device: Device) -> None:
    """One multiplication: opens cuBLAS, which no graph capture could. Raises DeviceUnavailable if it is missing."""
    with device.alloc(12, "cuBLAS trial") as buffer:
        device.fill(buffer, 0)
        device.gemm(buffer.view(0, 4), buffer.view(4, 4), buffer.view(8, 4), 1, 1, 1)
        device.synchronize()


def _mib(nbytes: int) -> int:
    return round(nbytes / _MIB)


class Projections:
    """Multiplies by weights as the plan says. `keep` closes what is allocated here."""

    def __init__(self, device: Device, plan: ProjectionPlan, keep: ExitStack):
        self.plan = plan
        self._device = device
        self._keep = keep
        self._rows: dict[str, DeviceTensor] = {}  # (N, K) f32, plain, for cuBLAS
        self._packed: dict[str, CudaMatrix] = {}  # F32, packed, for our own GEMM
        self._up: DeviceTensor | None = None  # (T, F) f32

    def load(self, file: GGUFFile, matrix: CudaMatrix) -> None:
        """Materialises the matrix if the plan has it."""
        if matrix.name not in self.plan.materialised:
            return
        if self.plan.cublas:
            buffer, rows = tensor.empty(
                self._device, (matrix.rows, matrix.columns), np.float32, f"{matrix.name} in f32"
            )
            self._keep.enter_context(buffer)
            embed.dequantize(self._device, matrix, rows)
            self._rows[matrix.name] = rows
        else:
            packed = pack.load_matrix_as_f32(file, matrix.name, self._device)
            self._keep.callback(packed.close)
            self._packed[matrix.name] = packed

    def new_workspace(self, config: ModelConfig, limits: StepLimits) -> None:
        """Allocates scratch for the largest step."""
        if self.plan.scratch:
            buffer, self._up = tensor.empty(self._device, (limits.rows, config.d_ff), np.float32, "up")
            self._keep.enter_context(buffer)

    def project(
        self,
        x: DeviceTensor | Staged,
        matrices: Sequence[CudaMatrix],
        outs: Sequence[DeviceTensor],
        biases: Sequence[DeviceTensor | None] | None = None,
        *,
        add: bool = False,
    ) -> None:
        """As `project.project`."""
        given = biases if biases is not None else [None] * len(matrices)
        if isinstance(x, Staged) or len(x) < GEMM_FROM_ROWS:
            project.project(self._device, x, matrices, outs, given, add=add)
            return
        for matrix, out, bias in zip(matrices, outs, given, strict=True):
            if matrix.name in self._rows:
                if bias is not None:
                    spread_bias(self._device, out, bias, add=add)
                self._multiply(x, matrix, out, add=add or bias is not None)
            else:
                project.project(self._device, x, (self._packed.get(matrix.name, matrix),), (out,), (bias,), add=add)

    def gate_up_swiglu(
        self, x: DeviceTensor | Staged, gate: CudaMatrix, up: CudaMatrix, out: DeviceTensor | Staged
    ) -> None:
        """As `project.gate_up_swiglu`."""
        if isinstance(x, DeviceTensor) and isinstance(out, DeviceTensor) and len(x) >= GEMM_FROM_ROWS:
            if gate.name in self._rows and self._up is not None:
                second = self._up[: len(x)]
                self._multiply(x, gate, out)
                self._multiply(x, up, second)
                swiglu(self._device, out, second, out)
                return
            gate, up = (self._packed.get(m.name, m) for m in (gate, up))
        project.gate_up_swiglu(self._device, x, gate, up, out)

    def _multiply(self, x: DeviceTensor, matrix: CudaMatrix, out: DeviceTensor, *, add: bool = False) -> None:
        rows, weights = len(x), self._rows[matrix.name]
        a = x.require(f"the input of {matrix.name}", (rows, matrix.columns))
        c = out.require(f"the output of {matrix.name}", (rows, matrix.rows))
        self._device.gemm(a, weights.memory, c, rows, matrix.rows, matrix.columns, accumulate=add)
