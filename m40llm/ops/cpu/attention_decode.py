"""Attention of single query tokens over a cached sequence (decode): memory-bound, split over sequences, heads and keys.

A chunk of keys gets its scores, softmax and weighted values in turn; chunks are merged by their maxima and sums (the online
softmax of Milakov and Gimelshein, 2018; the split over keys is that of Flash-Decoding, 2023). A chunk's size does not depend
on the number of threads, and chunks are merged in order whoever computed them: any number of threads gives the same bits,
and a sequence's result does not depend on which others are in the step.

In a step of single rows the kernel also rotates Q and K and appends K and V (rope.py): each of those is a few dozen vectors,
and a kernel of its own would cost more than they do for the threads to meet.
"""

import functools

import numba
import numpy as np
from numba.extending import register_jitable

from m40llm.ops.cpu.attention_tiles import dot_keys, weigh_values
from m40llm.ops.cpu.intrinsics import atomic_add, f32, i32, record, store_release
from m40llm.ops.cpu.program import Kernel, kernel, layout, pointer
from m40llm.ops.cpu.rope import append, rotate
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

__all__ = ["NOT_RAW", "attention_decode", "decode_scratch"]

CHUNK = 64  # keys; small enough that short sequences still occupy all threads
LOG2E = 1.4426950408889634
NOTHING = -1.0e30  # a score that weighs nothing, finite so that differences of two are numbers
HEADER = 32  # floats at the start of a thread's scratch: chunks done of the row that others continue (int64), a sink for _fetch
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
        # (T, KH, HD), rotated in place and appended; null from here on where rope_append has been run
        new_k=pointer(np.float32),
        new_v=pointer(np.float32),
        cos=pointer(np.float32),  # (positions, pairs)
        sin=pointer(np.float32),
        pairs=np.int64,
    )


DECODE = decode_layout(np.uint16)
# the fields of `decode_layout` where rope_append has been run
NOT_RAW = {"new_k": None, "new_v": None, "cos": None, "sin": None, "pairs": 0}


# A plain function where Python calls it: compiling it at every start took a fifth of the load time.
@register_jitable(**HELPER)
def _padded(heads):
    return (heads + PAD - 1) // PAD * PAD


@register_jitable(**HELPER)
def _places(heads, head_dim):
    """A thread's scratch after the header and the queries, in bytes: scores, factors of a merge, parts, and a part's size.

    A part is the unnormalised output of some heads over some keys, with their maxima and sums of weights. The first is
    the row at hand (the state), the second a chunk of it; the others are chunks of the unfinished row by other threads.
    """
    scores = 4 * (HEADER + heads * head_dim)
    factors = scores + 4 * heads * CHUNK
    state = factors + 8 * _padded(heads)
    return scores, factors, state, 4 * (heads * head_dim + 2 * _padded(heads))


def decode_scratch(threads: int, n_heads: int, n_kv_heads: int, head_dim: int, context: int) -> np.ndarray:
    """Scratch of `attention_decode`: (threads, scratch_stride) float32, zeros.

    Pages are committed when they are first used, so a context that is never reached costs nothing.
    """
    _, _, state, part = _places(n_heads, head_dim)
    floats = (state + (2 + -(-context // CHUNK)) * part) // 4
    stride = -(-floats // PAD) * PAD
    raw = np.zeros(threads * stride + PAD, np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + threads * stride].reshape(threads, stride)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(limit, 1))


@numba.njit(**HELPER)
def _merge(state, part, factors, group, head_dim):
    """state += part. Both: (group, head_dim) float32 sums, then maxima and sums of weights, padded to 16."""
    pad = _padded(group)
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
    pad = _padded(group)
    sums = f32(state + 4 * (group * head_dim + pad), pad)
    for g in range(group):
        inverse = splat(as_f32(1.0) / sums[g])
        for i in range(4 * g * head_dim, 4 * (g + 1) * head_dim, 64):
            store(out + i, load(state + i) * inverse)


@numba.njit(**HELPER)
def _softmax_line(line, count):
    """exp2(x - max) of `count` scores in place, further ones up to a multiple of 16 become 0; their maximum and sum."""
    width = (count + 15) // 16 * 16
    tail = f32(line, width)
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
    return top, hsum(total)


@numba.njit(**HELPER)
def _fetch(address, size):
    """Brings a range into the cache; the result only keeps the loads alive.

    The processor's prefetchers follow this stream, but not the order in which dot products visit rows. It is for the first keys
    of a thread's share; whatever comes later is asked for during the arithmetic before it.
    """
    a = b = c = d = splat(as_f32(0.0))
    for i in range(address, address + size // 256 * 256, 256):
        a, b = vmax(load(i), a), vmax(load(i + 64), b)
        c, d = vmax(load(i + 128), c), vmax(load(i + 192), d)
    return vmax(vmax(a, b), vmax(c, d))


@functools.cache
def attention_decode(group: int, head_dim: int, half: bool, interleaved: bool | None = None) -> Kernel:
    """The kernel for `group` = H / KH query heads per KV head; `half`: K and V are FP16 bits, otherwise float32.

    Handles the step's segments of one row and leaves the others' output alone. Where a row's keys are split between threads,
    the one that is done last merges them. interleaved: Q, K and V come as the projections left them, and this is how
    rope_append would pair their elements; None: it has been run.
    """
    heads = _largest_divisor(group, 7 if group == 7 else 6)
    keys = 1 << max(0, min(3, (ACCUMULATORS // heads).bit_length() - 1))
    vectors = _largest_divisor(head_dim // 16, ACCUMULATORS // heads)
    is_half = int(half)
    itemsize = 2 if half else 4
    raw, neighbours = int(interleaved is not None), int(bool(interleaved))

    def body(args, tid, threads):
        a = record(args, DECODE)
        cu, kv_lens, slots = i32(a.cu_seqlens, a.segments + 1), i32(a.kv_lens, a.segments), i32(a.slots, a.segments)
        own = a.scratch + 4 * tid * a.scratch_stride
        scores_at, factors_at, state_at, part_bytes = _places(a.kv_heads * group, head_dim)
        queries, scores, factors, state = own + 4 * HEADER, own + scores_at, own + factors_at, own + state_at

        chunks_in_all = 0
        for s in range(a.segments):
            if cu[s + 1] - cu[s] == 1:
                visible = kv_lens[s] if a.window == 0 else min(kv_lens[s], a.window)
                chunks_in_all += (visible + CHUNK - 1) // CHUNK
        # All heads of a chunk together read memory as one stream; short sequences are split by head instead.
        together = a.kv_heads if chunks_in_all >= 4 * threads else 1
        items = chunks_in_all * (a.kv_heads // together)
        begin, end = items * tid // threads, items * (tid + 1) // threads
        width = together * group  # query heads at once

        item = 0  # of the first chunk of a row's heads h to h + together
        scale = splat(as_f32(a.scale * LOG2E))
        for s in range(a.segments):
            if cu[s + 1] - cu[s] != 1:
                continue
            n = kv_lens[s]
            first = 0 if a.window == 0 else max(0, n - a.window)
            chunks = (n - first + CHUNK - 1) // CHUNK
            for h in range(0, a.kv_heads, together):
                low, high = max(begin - item, 0), min(end - item, chunks)
                if low < high:
                    row = (cu[s] * a.kv_heads + h) * (4 * group * head_dim)
                    slot = slots[s] * a.slot_stride + h * (head_dim * itemsize)
                    angle = 4 * (n - 1) * a.pairs
                    for i in range(0, 4 * width * head_dim, 64):
                        store(queries + i, load(a.q + row + i))
                    if raw == 1:
                        for g in range(0, 4 * width * head_dim, 4 * head_dim):
                            rotate(neighbours, queries + g, a.cos + angle, a.sin + angle, a.pairs)
                        if high == chunks:  # exactly one thread has the chunk with the row's own position
                            new = (cu[s] * a.kv_heads + h) * (4 * head_dim)
                            last = slot + (n - 1) * a.pos_stride
                            for i in range(together):
                                to = i * (head_dim * itemsize)
                                k, v = a.new_k + new + 4 * head_dim * i, a.new_v + new + 4 * head_dim * i
                                rotate(neighbours, k, a.cos + angle, a.sin + angle, a.pairs)
                                append(is_half, k, v, a.k + last + to, a.v + last + to, head_dim)
                    for i in range(0, 4 * width * head_dim, 64):
                        store(queries + i, load(queries + i) * scale)
                    owner = tid
                    while items * owner // threads > item:
                        owner -= 1
                    shared = a.scratch + 4 * owner * a.scratch_stride
                    parts = shared + state_at + 2 * part_bytes
                    for c in range(low, high):
                        key = first + c * CHUNK
                        count = min(CHUNK, n - key)
                        k, v = a.k + slot + key * a.pos_stride, a.v + slot + key * a.pos_stride
                        part = state if c == 0 else (state + part_bytes if owner == tid else parts + c * part_bytes)
                        after = k + CHUNK * a.pos_stride  # asked for by the values, as these are by the keys
                        if c == low and together == a.kv_heads:
                            store(own + 64, _fetch(k, count * a.pos_stride))
                        for j in range(0, count, keys):
                            for g in range(0, width, heads):
                                dot_keys(
                                    heads, keys, head_dim, is_half, queries + 4 * g * head_dim,
                                    k + j * a.pos_stride + g // group * (head_dim * itemsize), a.pos_stride, count - j, v - k,
                                    scores + 4 * (g * CHUNK + j), 4 * CHUNK,
                                )  # fmt: skip
                        pad = _padded(width)
                        maxima = f32(part + 4 * width * head_dim, pad)
                        sums = f32(part + 4 * (width * head_dim + pad), pad)
                        for g in range(width):
                            maxima[g], sums[g] = _softmax_line(scores + 4 * g * CHUNK, count)
                        for g in range(0, width, heads):
                            at = v + g // group * (head_dim * itemsize)
                            for d in range(0, head_dim, 16 * vectors):
                                weigh_values(
                                    heads, vectors, is_half, scores + 4 * g * CHUNK, 4 * CHUNK, at + d * itemsize,
                                    a.pos_stride, count, after - v, part + 4 * (g * head_dim + d), 4 * head_dim,
                                )  # fmt: skip
                        if owner == tid and c > 0:
                            _merge(state, part, factors, width, head_dim)
                    if low == 0 and high == chunks:
                        _finish(state, a.out + row, width, head_dim)
                    elif atomic_add(shared, high - low) + high - low == chunks:  # the others are done
                        store_release(shared, 0)
                        whole = shared + state_at
                        for c in range(items * (owner + 1) // threads - item, chunks):
                            _merge(whole, parts + c * part_bytes, factors, width, head_dim)
                        _finish(whole, a.out + row, width, head_dim)
                item += chunks

    pairing = "" if interleaved is None else ", rope pairs" if interleaved else ", rope halves"
    name = f"attention_decode[{group}x{head_dim}{pairing}]"
    return kernel(decode_layout(np.uint16 if half else np.float32), name)(body)
