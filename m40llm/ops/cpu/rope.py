"""Rotary position embedding of Q and K, and the append of K and V to the cache."""

import functools

import numba
import numpy as np

from m40llm.ops.cpu.intrinsics import f32, i32, record
from m40llm.ops.cpu.program import Kernel, kernel, layout, pointer
from m40llm.ops.cpu.simd import fma, load, load_twice, store, store_f16, swap_pairs
from m40llm.ops.rope_table import rope_frequencies, rope_tables

__all__ = ["append", "rope_append", "rope_frequencies", "rope_tables", "rotate"]

HELPER = {"_nrt": False, "error_model": "numpy", "boundscheck": False}


def _layout(storage: type) -> np.dtype:
    return layout(
        q=pointer(np.float32),  # (T, H*HD), rotated in place
        k=pointer(np.float32),  # (T, KH*HD), rotated in place
        v=pointer(np.float32),  # (T, KH*HD)
        cos=pointer(np.float32),  # (positions, pairs)
        sin=pointer(np.float32),
        pos=pointer(np.int32),  # (T,)
        row_slot=pointer(np.int32),  # (T,)
        k_cache=pointer(storage),  # one layer
        v_cache=pointer(storage),
        slot_stride=np.int64,  # bytes
        pos_stride=np.int64,  # bytes
        rows=np.int64,  # T
        heads=np.int64,  # H
        kv_heads=np.int64,  # KH
        head_dim=np.int64,  # HD
        pairs=np.int64,  # ≤ HD/2; further elements are not rotated
    )


ROPE = _layout(np.uint16)


@numba.njit(**HELPER)
def _rotate_halves(x, cos, sin, pairs):
    """Pairs (i, i + pairs)."""
    whole = pairs // 16 * 16
    for i in range(0, 4 * whole, 64):
        c, s = load(cos + i), load(sin + i)
        x0, x1 = load(x + i), load(x + i + 4 * pairs)
        store(x + i, x0 * c - x1 * s)
        store(x + i + 4 * pairs, fma(x1, c, x0 * s))
    a, c, s = f32(x, 2 * pairs), f32(cos, pairs), f32(sin, pairs)
    for i in range(whole, pairs):
        x0, x1 = a[i], a[i + pairs]
        a[i], a[i + pairs] = x0 * c[i] - x1 * s[i], x1 * c[i] + x0 * s[i]


@numba.njit(**HELPER)
def _rotate_neighbours(x, cos, sin, pairs):
    """Pairs (2i, 2i + 1)."""
    whole = pairs // 8 * 8
    for i in range(0, 4 * whole, 32):
        both = load(x + 2 * i)
        turned = swap_pairs(both) * load_twice(sin + i, -1.0)
        store(x + 2 * i, fma(both, load_twice(cos + i, 1.0), turned))
    a, c, s = f32(x, 2 * pairs), f32(cos, pairs), f32(sin, pairs)
    for i in range(whole, pairs):
        x0, x1 = a[2 * i], a[2 * i + 1]
        a[2 * i], a[2 * i + 1] = x0 * c[i] - x1 * s[i], x1 * c[i] + x0 * s[i]


@numba.njit(**HELPER)
def rotate(neighbours, x, cos, sin, pairs):
    """Rotates the head at x in place; neighbours: 1 pairs (2i, 2i + 1), 0 pairs (i, i + pairs)."""
    if neighbours == 1:
        _rotate_neighbours(x, cos, sin, pairs)
    else:
        _rotate_halves(x, cos, sin, pairs)


@numba.njit(**HELPER)
def append(is_half, k, v, k_cache, v_cache, head_dim):
    """Stores one head's key and value, float32, in the cache."""
    for d in range(0, head_dim, 16):
        if is_half == 1:
            store_f16(k_cache + 2 * d, load(k + 4 * d))
            store_f16(v_cache + 2 * d, load(v + 4 * d))
        else:
            store(k_cache + 4 * d, load(k + 4 * d))
            store(v_cache + 4 * d, load(v + 4 * d))


@functools.cache
def rope_append(interleaved: bool, half: bool) -> Kernel:
    """The kernel that rotates Q and K in place and stores K and V at (row_slot[t], pos[t]).

    interleaved: pairs are neighbours (llama), otherwise halves (NeoX). half: the cache holds FP16 bits (rounded to nearest
    even), otherwise float32. Heads are shared out over threads.
    """
    neighbours, is_half = int(interleaved), int(half)
    itemsize = 2 if half else 4

    def body(args, tid, threads):
        a = record(args, ROPE)
        pos, row_slot = i32(a.pos, a.rows), i32(a.row_slot, a.rows)
        per_row = a.heads + a.kv_heads
        units = a.rows * per_row
        bytes_per_head = 4 * a.head_dim
        for unit in range(units * tid // threads, units * (tid + 1) // threads):
            t, h = unit // per_row, unit % per_row
            kv = h - a.heads
            at = (t * a.kv_heads + kv) * bytes_per_head
            x = a.q + (t * a.heads + h) * bytes_per_head if kv < 0 else a.k + at
            angle = 4 * pos[t] * a.pairs
            rotate(neighbours, x, a.cos + angle, a.sin + angle, a.pairs)
            if kv >= 0:
                offset = row_slot[t] * a.slot_stride + pos[t] * a.pos_stride + kv * a.head_dim * itemsize
                append(is_half, x, a.v + at, a.k_cache + offset, a.v_cache + offset, a.head_dim)

    return kernel(_layout(np.uint16 if half else np.float32), f"rope_append[{'pairs' if interleaved else 'halves'}]")(
        body
    )
