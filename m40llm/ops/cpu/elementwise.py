"""RMSNorm, SwiGLU, residual addition and greedy argmax over packed rows."""

import numba
import numpy as np

from m40llm.ops.cpu.intrinsics import f32, i32, record
from m40llm.ops.cpu.program import kernel, layout, pointer
from m40llm.ops.cpu.simd import as_f32, exp_v, hmax, load, select_gt, splat, store, sum_squares, vmax

__all__ = ["add", "argmax", "argmax_merge", "rmsnorm", "swiglu"]

RMSNORM = layout(
    x=pointer(np.float32),  # (rows of x, D)
    weight=pointer(np.float32),  # (D,)
    out=pointer(np.float32),  # (rows, D)
    index=pointer(np.int32),  # (rows,) which rows of x; None: all, in order
    rows=np.int64,
    width=np.int64,  # D
    eps=np.float64,
)


@kernel(RMSNORM)
def rmsnorm(args, tid, threads):
    """out[r] = x[index[r]] / sqrt(mean(x²) + eps) · weight, the sum in float64 (Zhang and Sennrich, 2019). Rows over threads."""
    a = record(args, RMSNORM)
    whole = a.width // 16 * 16
    index, weight = i32(a.index, a.rows), f32(a.weight, a.width)
    for r in range(a.rows * tid // threads, a.rows * (tid + 1) // threads):
        row = 4 * a.width * (r if a.index == 0 else index[r])
        x, out = f32(a.x + row, a.width), f32(a.out + 4 * a.width * r, a.width)
        total = sum_squares(a.x + row, whole)
        for i in range(whole, a.width):
            total += np.float64(x[i]) * np.float64(x[i])
        scale = as_f32(1.0 / np.sqrt(total / a.width + a.eps))
        for i in range(0, 4 * whole, 64):
            store(a.out + 4 * a.width * r + i, load(a.x + row + i) * splat(scale) * load(a.weight + i))
        for i in range(whole, a.width):
            out[i] = x[i] * scale * weight[i]


SWIGLU = layout(gate=pointer(np.float32), up=pointer(np.float32), out=pointer(np.float32), size=np.int64)


@numba.njit(_nrt=False, error_model="numpy", boundscheck=False)
def _silu(x):
    """x / (1 + e^-x); 0 below -88, where e^-x leaves float32's range (and the result is above -1e-36). NaN stays NaN."""
    zero, low = splat(as_f32(0.0)), splat(as_f32(-88.0))
    quotient = x / (splat(as_f32(1.0)) + exp_v(zero - vmax(x, low)))
    return select_gt(low, x, zero, quotient)


@kernel(SWIGLU)
def swiglu(args, tid, threads):
    """out = silu(gate) · up over `size` elements (Shazeer, 2020); out may be gate or up."""
    a = record(args, SWIGLU)
    blocks = (a.size + 15) // 16
    for i in range(64 * (blocks * tid // threads), 64 * (blocks * (tid + 1) // threads), 64):
        if i // 4 + 16 <= a.size:
            store(a.out + i, _silu(load(a.gate + i)) * load(a.up + i))
        else:
            count = a.size - i // 4
            gate, up, out = f32(a.gate + i, count), f32(a.up + i, count), f32(a.out + i, count)
            for j in range(count):
                out[j] = hmax(_silu(splat(gate[j]))) * up[j]


ADD = layout(x=pointer(np.float32), y=pointer(np.float32), size=np.int64)


@kernel(ADD)
def add(args, tid, threads):
    """x += y over `size` elements."""
    a = record(args, ADD)
    x, y = f32(a.x, a.size), f32(a.y, a.size)
    for i in range(a.size * tid // threads, a.size * (tid + 1) // threads):
        x[i] += y[i]


ARGMAX = layout(
    logits=pointer(np.float32),  # (R, V)
    rows=np.int64,  # R
    width=np.int64,  # V
    values=pointer(np.float32),  # (threads, R) scratch
    places=pointer(np.int32),  # (threads, R) scratch
    ids=pointer(np.int32),  # (R,) the result
)
NOWHERE = 2**31 - 1


@kernel(ARGMAX)
def argmax(args, tid, threads):
    """Each thread's largest logit of every row and its place; `argmax_merge` chooses among them after a barrier.

    NaN never wins; among equals the lowest id does.
    """
    a = record(args, ARGMAX)
    values, places = f32(a.values, a.rows * threads), i32(a.places, a.rows * threads)
    begin, end = a.width * tid // threads, a.width * (tid + 1) // threads
    count = end - begin
    whole = count // 16 * 16
    for r in range(a.rows):
        at = a.logits + 4 * (r * a.width + begin)
        x = f32(at, count)
        tops = splat(as_f32(-np.inf))
        for i in range(0, 4 * whole, 64):
            tops = vmax(load(at + i), tops)
        top = hmax(tops)
        for i in range(whole, count):
            if x[i] > top:
                top = x[i]
        place = 0
        while place < count and x[place] != top:
            place += 1
        values[tid * a.rows + r] = top
        places[tid * a.rows + r] = begin + place if place < count else NOWHERE


@kernel(ARGMAX)
def argmax_merge(args, tid, threads):
    """ids[r] = place of the largest logit of row r; 0 where every logit is NaN."""
    a = record(args, ARGMAX)
    values, places, ids = f32(a.values, a.rows * threads), i32(a.places, a.rows * threads), i32(a.ids, a.rows)
    for r in range(a.rows * tid // threads, a.rows * (tid + 1) // threads):
        best, place = values[r], places[r]
        for other in range(1, threads):
            value, candidate = values[other * a.rows + r], places[other * a.rows + r]
            if value > best or (value == best and candidate < place):
                best, place = value, candidate
        ids[r] = 0 if place == NOWHERE else place
