"""Projections: y = x @ W.T for packed matrices, with their epilogues, recorded into programs.

Each thread takes a contiguous range of row groups. Within it, a block of groups that fits the core's L2 cache meets one
tile of tokens after the other: weights come from memory once, activations once per block of groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from m40llm.ops.cpu.formats import BLOCK, FORMATS, ROWS
from m40llm.ops.cpu.intrinsics import call_tile, f32, record, stack
from m40llm.ops.cpu.packing import PackedMatrix
from m40llm.ops.cpu.program import Program, kernel, layout, pointer
from m40llm.ops.cpu.quantise import TILE, TILE_BLOCK_BYTES, QuantisedRows, rest_tokens
from m40llm.ops.cpu.simd import exp_v, load, select_gt, splat, store
from m40llm.ops.cpu.tile import tile_kernel

__all__ = ["Projection", "record_gate_up_swiglu", "record_project"]

L2_BYTES = 256 << 10  # of weights that meet all tiles before the next block
LANE_BYTES = 4 * ROWS


@dataclass(frozen=True)
class Projection:
    """out (T, N) = x @ matrix.T [+ bias (N,)], or out += ... with ``add``. Rows of out are contiguous float32."""

    matrix: PackedMatrix
    out: np.ndarray
    bias: np.ndarray | None = None
    add: bool = False


OPERAND = {
    "tile": np.int64,  # address of the tile kernel for 8 tokens, and for the rest
    "rest_tile": np.int64,
    "quants": pointer(np.uint8),
    "scales": pointer(np.uint8),
    "quants_bytes": np.int64,  # per group
    "scales_bytes": np.int64,
    "steps": np.int64,
    "x": pointer(np.uint8),
    "x_row_bytes": np.int64,
    "fine": np.int64,  # bytes from x to the tiles of what its 16 bits leave; 0: there are none
}
RESULT = {
    "n": np.int64,
    "rows": np.int64,
    "block": np.int64,  # row groups that meet all tiles before the next ones
    "out": pointer(np.float32),
    "stride": np.int64,  # of out, in elements
}
PROJECT = layout(**OPERAND, **RESULT, bias=pointer(np.float32), add=np.int64)


@numba.njit(_nrt=False, error_model="numpy", boundscheck=False)
def _products(tile, quants, scales, x, fine, y_at, scratch, steps, tokens):
    """y (tokens, 16) = one group of rows times the tile of x, and times what is left of it."""
    call_tile(tile, quants, scales, x, y_at, steps)
    if fine != 0:
        call_tile(tile, quants, scales, x + fine, scratch, steps)
        for t in range(0, LANE_BYTES * tokens, LANE_BYTES):
            store(y_at + t, load(y_at + t) + load(scratch + t))


@kernel(PROJECT)
def project(args, tid, threads):
    """y = W x (+ bias), into out or added to it."""
    a = record(args, PROJECT)
    y_at, scratch = stack(512), stack(512)
    y = f32(y_at, TILE * ROWS)
    groups = (a.n + ROWS - 1) // ROWS
    bias = f32(a.bias, a.n)
    stop = (tid + 1) * groups // threads
    for start in range(tid * groups // threads, stop, a.block):
        for first in range(0, a.rows, TILE):
            x = a.x + first * a.x_row_bytes
            tokens = min(TILE, a.rows - first)
            tile = a.tile if tokens == TILE else a.rest_tile
            for g in range(start, min(start + a.block, stop)):
                quants, scales = a.quants + g * a.quants_bytes, a.scales + g * a.scales_bytes
                _products(tile, quants, scales, x, a.fine, y_at, scratch, a.steps, tokens)
                width = min(ROWS, a.n - g * ROWS)
                for t in range(tokens):
                    out = f32(a.out + ((first + t) * a.stride + g * ROWS) * 4, width)
                    for j in range(width):
                        value = y[t * ROWS + j]
                        if a.bias != 0:
                            value += bias[g * ROWS + j]
                        if a.add != 0:
                            value += out[j]
                        out[j] = value


GATE_UP = layout(**OPERAND, **{f"up_{name}": kind for name, kind in OPERAND.items()}, **RESULT)


@kernel(GATE_UP)
def gate_up_swiglu(args, tid, threads):
    """out = silu(gate x) * (up x)."""
    a = record(args, GATE_UP)
    gate_at, up_at, scratch = stack(512), stack(512), stack(512)
    gate = f32(gate_at, TILE * ROWS)
    groups = (a.n + ROWS - 1) // ROWS
    one, most = splat(np.float32(1.0)), splat(np.float32(87.0))
    zero = splat(np.float32(0.0))
    stop = (tid + 1) * groups // threads
    for start in range(tid * groups // threads, stop, a.block):
        for first in range(0, a.rows, TILE):
            x = a.x + first * a.x_row_bytes
            tokens = min(TILE, a.rows - first)
            up_x = a.up_x + first * a.up_x_row_bytes
            tile = a.tile if tokens == TILE else a.rest_tile
            up_tile = a.up_tile if tokens == TILE else a.up_rest_tile
            for g in range(start, min(start + a.block, stop)):
                quants, scales = a.quants + g * a.quants_bytes, a.scales + g * a.scales_bytes
                _products(tile, quants, scales, x, a.fine, gate_at, scratch, a.steps, tokens)
                up_quants, up_scales = a.up_quants + g * a.up_quants_bytes, a.up_scales + g * a.up_scales_bytes
                _products(up_tile, up_quants, up_scales, up_x, a.up_fine, up_at, scratch, a.up_steps, tokens)
                width = min(ROWS, a.n - g * ROWS)
                for t in range(tokens):
                    v = load(gate_at + LANE_BYTES * t)
                    minus = zero - v
                    v = v / (one + exp_v(select_gt(minus, most, most, minus))) * load(up_at + LANE_BYTES * t)
                    place = a.out + ((first + t) * a.stride + g * ROWS) * 4
                    if width == ROWS:
                        store(place, v)
                    else:
                        store(gate_at + LANE_BYTES * t, v)
                        out = f32(place, width)
                        for j in range(width):
                            out[j] = gate[t * ROWS + j]


def _operand(program: Program, matrix: PackedMatrix, q: QuantisedRows) -> dict:
    """The fields of a matrix and its input; adds the conversion of the input where it is still missing."""
    x, rows = q.source()
    if x.shape[1] != matrix.k:
        raise ValueError(f"the input has {x.shape[1]} columns, the matrix {matrix.k}")
    quantised = matrix.type in FORMATS
    rest = rest_tokens(rows)
    return {
        "tile": tile_kernel(q.isa, matrix.type, TILE).address(program.on_compile) if rows >= TILE else 0,
        "rest_tile": tile_kernel(q.isa, matrix.type, rest).address(program.on_compile) if rest else 0,
        "quants": matrix.quants,
        "scales": matrix.scales,
        "quants_bytes": matrix.quants.shape[1],
        "scales_bytes": matrix.scales.shape[1],
        "steps": matrix.k // BLOCK if quantised else matrix.k,
        "x": q.record(program, quantised).view(np.uint8),
        "x_row_bytes": matrix.k // BLOCK * TILE_BLOCK_BYTES if quantised else 4 * matrix.k,
        "fine": q.fine_offset if quantised else 0,
    }


def _result(q: QuantisedRows, out: np.ndarray, *matrices: PackedMatrix) -> dict:
    rows, n = q.source()[1], matrices[0].n
    if out.dtype != np.float32 or out.shape != (rows, n) or out.strides[1] != 4:
        raise ValueError(f"out must be {(rows, n)} float32 with contiguous rows, not {out.dtype} {out.shape}")
    group_bytes = sum(m.quants.shape[1] + m.scales.shape[1] for m in matrices)
    block = max(1, L2_BYTES // group_bytes)
    return {"n": n, "rows": rows, "block": block, "out": out, "stride": out.strides[0] // 4}


def record_project(program: Program, projections: Sequence[Projection], q: QuantisedRows) -> None:
    """Record projections of the input that ``record_quantise`` named; they run back to back, then threads meet.

    Raises ValueError where shapes or dtypes do not fit.
    """
    for i, p in enumerate(projections):
        if p.bias is not None and p.bias.shape != (p.matrix.n,):
            raise ValueError(f"bias must be ({p.matrix.n},) float32, not {p.bias.dtype} {p.bias.shape}")
        fields = _operand(program, p.matrix, q) | _result(q, p.out, p.matrix)
        last = i == len(projections) - 1
        program.add(project, barrier=last, **fields, bias=p.bias, add=int(p.add))


def record_gate_up_swiglu(
    program: Program, gate: PackedMatrix, up: PackedMatrix, q: QuantisedRows, out: np.ndarray
) -> None:
    """Record out (T, F) = silu(x @ gate.T) * (x @ up.T) (Shazeer, 2020); the two may differ in type, not in shape."""
    if (gate.n, gate.k) != (up.n, up.k):
        raise ValueError(f"gate is ({gate.n}, {gate.k}), up ({up.n}, {up.k})")
    fields = {f"up_{name}": value for name, value in _operand(program, up, q).items()}
    program.add(gate_up_swiglu, **_operand(program, gate, q), **fields, **_result(q, out, gate, up))
