"""Attention of single query tokens over a cached sequence (decode): memory-bound, split over sequences, heads and keys.

A chunk of keys gets its scores, softmax and weighted values in turn; chunks are merged by their maxima and sums (the online
softmax of Milakov and Gimelshein, 2018; the split over keys is that of Flash-Decoding, 2023). A chunk's size does not depend
on the number of threads, and chunks are merged in order whoever computed them: any number of threads gives the same bits,
and a sequence's result does not depend on which others are in the step.
"""

import functools

import numba
import numpy as np

from m40llm.ops.cpu.attention_tiles import dot_keys, weigh_values
from m40llm.ops.cpu.intrinsics import f32, i32, i64, record
from m40llm.ops.cpu.program import Kernel, aligned_empty, kernel, layout, pointer
from m40llm.ops.cpu.simd import (
    ACCUMULATORS,
    as_f32,
    exp2_v,
    fma,
    hmax,
    hsum,
    load,
    splat,
    store,
    vmax,
)

__all__ = ["attention_decode", "attention_merge", "decode_scratch"]

CHUNK = 128  # keys; small enough that short sequences still occupy all threads
LOG2E = 1.4426950408889634
NOTHING = -1.0e30  # a score that weighs nothing, finite so that differences of two are numbers
HEADER = 16  # floats, or 8 int64 words, at the start of a thread's scratch: the row-head that later threads continue
PAD = 16
HELPER = {"_nrt": False, "error_model": "numpy", "boundscheck": False}


def decode_layout(storage: type) -> np.dtype:
    return layout(
        q=pointer(np.float32),  # (T, H, HD)
        out=pointer(np.float32),  # (T, H, HD)
        k=pointer(storage),  # one layer of the cache
        v=pointer(storage),
        slot_stride=np.int64,  # bytes
        pos_stride=np.int64,  # bytes
        cu_seqlens=pointer(np.int32),  # (S+1,)
        kv_lens=pointer(np.int32),  # (S,) with this step's token
        slots=pointer(np.int32),  # (S,)
        segments=np.int64,  # S
        kv_heads=np.int64,  # KH
        window=np.int64,  # positions that a query sees, its own included; 0: all
        scale=np.float32,  # of the scores
        scratch=pointer(np.float32),  # of decode_scratch
        scratch_stride=np.int64,  # floats per thread
    )


DECODE = decode_layout(np.uint16)
MERGE = layout(
    out=pointer(np.float32), kv_heads=np.int64, scratch=pointer(np.float32), scratch_stride=np.int64
)  # as DECODE's


def _part_floats(group: int, head_dim: int) -> int:
    """Unnormalised output, maxima and sums of the heads that share one KV head, over some keys."""
    return group * head_dim + 2 * _padded(group)


def _padded(group: int) -> int:
    return -(-group // PAD) * PAD


def decode_scratch(threads: int, n_heads: int, n_kv_heads: int, head_dim: int, context: int) -> np.ndarray:
    """Scratch of `attention_decode` and `attention_merge`: (threads, scratch_stride) float32, zeros."""
    group = n_heads // n_kv_heads
    floats = HEADER + group * (head_dim + CHUNK) + 2 * _padded(group)
    floats += (2 + -(-context // CHUNK)) * _part_floats(group, head_dim)
    scratch = aligned_empty((threads, -(-floats // PAD) * PAD), np.float32)
    scratch[:] = 0
    return scratch


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(limit, 1))


@numba.njit(**HELPER)
def _merge(state, part, factors, group, head_dim):
    """state += part. Both: (group, head_dim) float32 sums, then maxima and sums of weights, padded to 16."""
    pad = (group + PAD - 1) // PAD * PAD
    maxima = 4 * group * head_dim
    sums = maxima + 4 * pad
    for i in range(0, 4 * pad, 64):
        old, new = load(state + maxima + i), load(part + maxima + i)
        top = vmax(old, new)
        keep, take = exp2_v(old - top), exp2_v(new - top)
        store(state + maxima + i, top)
        store(state + sums + i, load(state + sums + i) * keep + load(part + sums + i) * take)
        store(factors + i, keep)
        store(factors + 4 * pad + i, take)
    keeps, takes = f32(factors, pad), f32(factors + 4 * pad, pad)
    for g in range(group):
        keep, take = splat(keeps[g]), splat(takes[g])
        for i in range(4 * g * head_dim, 4 * (g + 1) * head_dim, 64):
            store(state + i, fma(load(state + i), keep, load(part + i) * take))


@numba.njit(**HELPER)
def _finish(state, out, group, head_dim):
    """out (group, head_dim) = state's sums / sums of weights."""
    pad = (group + PAD - 1) // PAD * PAD
    sums = f32(state + 4 * (group * head_dim + pad), pad)
    for g in range(group):
        inverse = splat(as_f32(1.0) / sums[g])
        for i in range(4 * g * head_dim, 4 * (g + 1) * head_dim, 64):
            store(out + i, load(state + i) * inverse)


@functools.cache
def attention_decode(group: int, head_dim: int, half: bool) -> Kernel:
    """The kernel for `group` = H / KH query heads per KV head; `half`: K and V are FP16 bits, otherwise float32.

    Handles the step's segments of one row and leaves the others' output alone. Where a head's keys were split between
    threads its output is not complete before `attention_merge` has run (with a barrier in between).
    """
    heads = _largest_divisor(group, 7 if group == 7 else 6)
    keys = 1 << max(0, min(3, (ACCUMULATORS // heads).bit_length() - 1))
    vectors = _largest_divisor(head_dim // 16, ACCUMULATORS // heads)
    is_half = int(half)
    itemsize = 2 if half else 4
    pad = _padded(group)
    part_bytes = 4 * _part_floats(group, head_dim)
    scores_at = 4 * (HEADER + group * head_dim)
    factors_at = scores_at + 4 * group * CHUNK
    state_at = factors_at + 8 * pad
    parts_at = state_at + 2 * part_bytes

    def body(args, tid, threads):
        a = record(args, DECODE)
        cu, kv_lens, slots = i32(a.cu_seqlens, a.segments + 1), i32(a.kv_lens, a.segments), i32(a.slots, a.segments)
        own = a.scratch + 4 * tid * a.scratch_stride
        queries, scores, factors, state = own + 4 * HEADER, own + scores_at, own + factors_at, own + state_at
        unfinished = i64(own, 8)
        unfinished[0] = -1

        items = 0
        for s in range(a.segments):
            if cu[s + 1] - cu[s] == 1:
                visible = kv_lens[s] if a.window == 0 else min(kv_lens[s], a.window)
                items += a.kv_heads * ((visible + CHUNK - 1) // CHUNK)
        begin, end = items * tid // threads, items * (tid + 1) // threads

        item = 0  # of the first chunk of the row-head
        scale = splat(as_f32(a.scale * LOG2E))
        for s in range(a.segments):
            if cu[s + 1] - cu[s] != 1:
                continue
            n = kv_lens[s]
            first = 0 if a.window == 0 else max(0, n - a.window)
            chunks = (n - first + CHUNK - 1) // CHUNK
            for h in range(a.kv_heads):
                low, high = max(begin - item, 0), min(end - item, chunks)
                if low < high:
                    row = (cu[s] * a.kv_heads + h) * (4 * group * head_dim)
                    for i in range(0, 4 * group * head_dim, 64):
                        store(queries + i, load(a.q + row + i) * scale)
                    owner = tid
                    while items * owner // threads > item:
                        owner -= 1
                    parts = a.scratch + 4 * owner * a.scratch_stride + parts_at
                    slot = slots[s] * a.slot_stride + h * (head_dim * itemsize)
                    for c in range(low, high):
                        key = first + c * CHUNK
                        count = min(CHUNK, n - key)
                        k, v = a.k + slot + key * a.pos_stride, a.v + slot + key * a.pos_stride
                        part = state if c == 0 else (state + part_bytes if owner == tid else parts + c * part_bytes)
                        for j in range(0, count, keys):
                            for g in range(0, group, heads):
                                dot_keys(
                                    heads, keys, head_dim, is_half, queries + 4 * g * head_dim, k + j * a.pos_stride,
                                    a.pos_stride, count - j, scores + 4 * (g * CHUNK + j), 4 * CHUNK,
                                )  # fmt: skip
                        maxima, sums = (
                            f32(part + 4 * group * head_dim, pad),
                            f32(part + 4 * (group * head_dim + pad), pad),
                        )
                        for g in range(group):
                            line = scores + 4 * g * CHUNK
                            tail = f32(line, CHUNK)
                            width = (count + 15) // 16 * 16
                            for j in range(count, width):
                                tail[j] = NOTHING
                            tops = load(line)
                            for j in range(64, 4 * width, 64):
                                tops = vmax(load(line + j), tops)
                            top = hmax(tops)
                            total = splat(as_f32(0.0))
                            for j in range(0, 4 * width, 64):
                                weight = exp2_v(load(line + j) - splat(top))
                                total = total + weight
                                store(line + j, weight)
                            maxima[g], sums[g] = top, hsum(total)
                        for g in range(0, group, heads):
                            for d in range(0, head_dim, 16 * vectors):
                                weigh_values(
                                    heads, vectors, is_half, scores + 4 * g * CHUNK, 4 * CHUNK, v + d * itemsize,
                                    a.pos_stride, count, part + 4 * (g * head_dim + d), 4 * head_dim,
                                )  # fmt: skip
                        if owner == tid and c > 0:
                            _merge(state, part, factors, group, head_dim)
                    if owner == tid:
                        if high == chunks:
                            _finish(state, a.out + row, group, head_dim)
                        else:
                            unfinished[0], unfinished[1], unfinished[2] = row, high, chunks
                item += chunks

    return kernel(decode_layout(np.uint16 if half else np.float32), f"attention_decode[{group}x{head_dim}]")(body)


@functools.cache
def attention_merge(group: int, head_dim: int) -> Kernel:
    """Completes the rows whose keys `attention_decode` split between threads."""
    part_bytes = 4 * _part_floats(group, head_dim)
    factors_at = 4 * (HEADER + group * (head_dim + CHUNK))
    state_at = factors_at + 8 * _padded(group)
    parts_at = state_at + 2 * part_bytes

    def body(args, tid, threads):
        a = record(args, MERGE)
        own = a.scratch + 4 * tid * a.scratch_stride
        unfinished = i64(own, 8)
        if unfinished[0] >= 0:
            for c in range(unfinished[1], unfinished[2]):
                _merge(own + state_at, own + parts_at + c * part_bytes, own + factors_at, group, head_dim)
            _finish(own + state_at, a.out + unfinished[0], group, head_dim)

    return kernel(MERGE, f"attention_merge[{group}x{head_dim}]")(body)
