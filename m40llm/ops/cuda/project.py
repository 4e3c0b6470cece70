"""Launchers of the projections: kernels/project.cuh (1 to 8 rows at a time) and kernels/gemm.cuh (many rows)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np

from m40llm.device.protocol import Argument, Device
from m40llm.ops.cuda.pack import GROUP, CudaMatrix
from m40llm.ops.cuda.staged import Staged, batch_of, kernel_formats
from m40llm.ops.cuda.tensor import DeviceTensor

_WARPS = 8  # of a project block; a warp owns a group of 4 weight rows
_GEMM_ROWS, _GEMM_COLUMNS, _GEMM_THREADS = 64, 128, 128
_MATRICES = 3  # of one launch
_NEVER = 2**31 - 1  # no block has this number
# A pass of 8 rows costs little more than reading the weights once; a GEMM tile computes 64 rows whether there or not.
GEMM_FROM_ROWS = 33

_Job = tuple[CudaMatrix, Argument, Argument]  # matrix, out, bias


class _Mode(IntEnum):
    """`ProjectMode` in kernels/project.cuh."""

    STORE = 0  # y = value
    ADD = 1  # y += value
    GATE = 2  # y = silu(y) * value
    SWIGLU = 3  # y = silu(first matrix) * second matrix
    SWIGLU_STAGED = 4  # the same, staged for a reader
    BIASED = 8  # on top: some matrix has a bias


def project(
    device: Device,
    x: DeviceTensor | Staged,
    matrices: Sequence[CudaMatrix],
    outs: Sequence[DeviceTensor],
    biases: Sequence[DeviceTensor | None] | None = None,
    *,
    add: bool = False,
    stream: Any = None,
) -> None:
    """outs[i] (T, N_i) = x (T, K) @ matrices[i].T + biases[i]; with `add`, outs[i] += that. All float32, contiguous.

    Up to 32 rows, up to three matrices of one type (or of types that one kernel handles) share a launch; so does Q, K, V.
    Beyond that there is one launch per matrix. A staged x is for exactly the formats of these matrices.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    rows = _check(x, matrices)
    mode = _Mode.ADD if add else _Mode.STORE
    given = biases if biases is not None else [None] * len(matrices)
    jobs: list[_Job] = [
        (
            m,
            out.require(f"the output of {m.name}", (rows, m.rows)),
            None if b is None else b.require(f"the bias of {m.name}", (m.rows,)),
        )
        for m, out, b in zip(matrices, outs, given, strict=True)
    ]
    if not isinstance(x, Staged) and rows >= GEMM_FROM_ROWS:
        for matrix, out, bias in jobs:
            _gemm(device, x, matrix, out, bias, mode, stream)
        return
    for kernel, members in _launches([m for m, _, _ in jobs]):
        _few_rows(device, x, kernel, [jobs[i] for i in members], mode, stream)


def gate_up_swiglu(
    device: Device,
    x: DeviceTensor | Staged,
    gate: CudaMatrix,
    up: CudaMatrix,
    out: DeviceTensor | Staged,
    stream: Any = None,
) -> None:
    """out (T, F) = silu(x @ gate.T) * (x @ up.T); x (T, K); float32 (Shazeer, 2020).

    One launch up to 32 rows, two beyond; `out` must not overlap x. A staged `out` needs gate and up in one launch.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    rows = _check(x, (gate, up))
    if gate.rows != up.rows:
        raise ValueError(f"{gate.name} has {gate.rows} rows and {up.name} {up.rows}; gate and up must be alike")
    launches = _launches([gate, up])
    if isinstance(out, Staged):
        if len(launches) > 1 or out.shape != (rows, gate.rows):
            raise ValueError(f"{gate.name} and {up.name} cannot write {out.shape} staged")
        staged_jobs: list[_Job] = [(gate, out.memory, None), (up, out.memory, None)]
        _few_rows(device, x, launches[0][0], staged_jobs, _Mode.SWIGLU_STAGED, stream, out.types[0])
        return
    memory = out.require("the output of gate and up", (rows, gate.rows))
    if not isinstance(x, Staged) and rows >= GEMM_FROM_ROWS:
        _gemm(device, x, gate, memory, None, _Mode.STORE, stream)
        _gemm(device, x, up, memory, None, _Mode.GATE, stream)
        return
    if len(launches) == 1:
        jobs: list[_Job] = [(gate, memory, None), (up, memory, None)]
        _few_rows(device, x, launches[0][0], jobs, _Mode.SWIGLU, stream)
        return
    _few_rows(device, x, gate.fmt.name, [(gate, memory, None)], _Mode.STORE, stream)
    _few_rows(device, x, up.fmt.name, [(up, memory, None)], _Mode.GATE, stream)


def _launches(matrices: Sequence[CudaMatrix]) -> list[tuple[str, list[int]]]:
    """(kernel name, indices into `matrices`) of the launches that projections of a few rows take together."""
    names = [m.fmt.name for m in matrices]
    everything = list(range(len(names)))
    formats = kernel_formats(matrices)
    if len(names) <= _MATRICES and formats:
        return [("_".join(formats), everything)]
    launches: list[tuple[str, list[int]]] = []
    for name in dict.fromkeys(names):
        members = [i for i in everything if names[i] == name]
        launches += [(name, members[i : i + _MATRICES]) for i in range(0, len(members), _MATRICES)]
    return launches


def _few_rows(
    device: Device,
    x: DeviceTensor | Staged,
    kernel: str,
    jobs: Sequence[_Job],
    mode: _Mode,
    stream: Any,
    y_type: int = -1,
) -> None:
    rows, columns = x.shape
    batch = batch_of(rows)
    used = 1 if mode in (_Mode.SWIGLU, _Mode.SWIGLU_STAGED) else len(jobs)  # gate and up share their blocks
    ends = [*accumulate(-(-m.rows // (GROUP * _WARPS)) for m, _, _ in jobs[:used])]
    first = [*ends[:-1], _NEVER, _NEVER][: _MATRICES - 1]  # block of the second matrix, of the third
    biased = _Mode.BIASED if any(bias is not None for _, _, bias in jobs) else 0
    spare = [None] * (_MATRICES - len(jobs))
    matrices = [m for m, _, _ in jobs]
    args: list[Argument] = [
        *(m.buffer for m in matrices),
        *spare,
        *(out for _, out, _ in jobs),
        *spare,
        *(bias for _, _, bias in jobs),
        *spare,
        *(np.int32(m.rows) for m in matrices),
        *(np.int32(0) for _ in spare),
        *(np.int32(block) for block in first),
        *(np.int32(m.fmt.ggml) for m in matrices),
        *(np.int32(0) for _ in spare),
        x.memory,
        np.int32(rows),
        np.int32(columns),
        np.int32(mode | biased),
        np.int32(isinstance(x, Staged)),
        np.int32(y_type),
    ]
    function = device.kernel(f"project_{kernel}", f"project_{kernel}_r{batch}")
    device.launch(function, (ends[-1], -(-rows // batch)), 32 * _WARPS, args, stream=stream)


def _gemm(
    device: Device, x: DeviceTensor, matrix: CudaMatrix, out: Argument, bias: Argument, mode: _Mode, stream: Any
) -> None:
    rows, columns = x.shape
    sizes = (np.int32(matrix.rows), np.int32(rows), np.int32(columns), np.int32(mode))
    function = device.kernel(f"project_{matrix.fmt.name}", f"gemm_{matrix.fmt.name}")
    grid = (-(-rows // _GEMM_ROWS), -(-matrix.rows // _GEMM_COLUMNS))
    device.launch(function, grid, _GEMM_THREADS, (matrix.buffer, out, bias, x.memory, *sizes), stream=stream)


def _check(x: DeviceTensor | Staged, matrices: Sequence[CudaMatrix]) -> int:
    """Number of rows of x. Raises ValueError unless x is (T, K) float32 for every matrix, or staged for all of them."""
    if len(x.shape) != 2 or not x.shape[0]:
        raise ValueError(f"the input of a projection must have rows and columns, not shape {x.shape}")
    if isinstance(x, Staged):
        for matrix in matrices:
            if x.formats != kernel_formats(matrices) or x.shape[1] != matrix.columns:
                raise ValueError(f"x {x.shape}, staged for {x.formats}, is not for {matrix.name}")
        return x.shape[0]
    for matrix in matrices:
        x.require(f"the input of {matrix.name}", (x.shape[0], matrix.columns))
    return x.shape[0]
