"""Causal attention of longer segments over the cache (prefill), packed without padding.

A tile is up to 64 vector lanes: as many positions as fit, times the query heads that share a KV head. With rows as lanes, scores
S[key, lane] = Σ_d K[key, d] · Qᵀ[d, lane] and outputs Oᵀ[d, lane] = Σ_key V[key, d] · P[key, lane] are the same register-tiled
product, the cache is used in its own order, and the softmax over keys needs no sums across lanes. The softmax runs online over
blocks of keys (FlashAttention; Dao et al., 2022).
"""

import functools

import numpy as np

from m40llm.ops.cpu.attention_decode import DECODE, LOG2E, NOTHING, decode_layout
from m40llm.ops.cpu.attention_tiles import gemm_tile, transpose
from m40llm.ops.cpu.intrinsics import f32, i32, i64, record
from m40llm.ops.cpu.program import Kernel, aligned_empty, kernel
from m40llm.ops.cpu.simd import (
    ACCUMULATORS,
    as_f32,
    exp2_v,
    load,
    load_f16,
    select_gt,
    splat,
    store,
    vmax,
)

__all__ = ["attention_prefill", "prefill_scratch"]

LANES = 64  # of a tile
KEYS = 64  # of a block
WIDE = 4 if ACCUMULATORS >= 16 else 1  # vectors per register tile when the tile of queries is full
ROWS = 4  # and its rows; 8 with one vector


def prefill_scratch(threads: int, head_dim: int) -> np.ndarray:
    """Scratch of `attention_prefill`: (threads, scratch_stride) float32."""
    floats = 2 * head_dim * LANES + KEYS * (2 * head_dim + LANES) + 4 * LANES + head_dim + 4 * LANES
    scratch = aligned_empty((threads, floats), np.float32)
    scratch[:] = 0
    return scratch


@functools.cache
def attention_prefill(group: int, head_dim: int, half: bool) -> Kernel:
    """The kernel for `group` = H / KH ≤ 64 query heads per KV head; `half`: K and V are FP16 bits, otherwise float32.

    Handles the step's segments of two rows and more and leaves the others' output alone. K and V of the segments' own positions
    must be in the cache. Its fields are those of `attention_decode`, with scratch from `prefill_scratch`.
    """
    per_tile = LANES // group  # positions
    is_half = int(half)
    itemsize = 2 if half else 4
    line = 4 * LANES
    outputs_at = line * head_dim
    scores_at = 2 * outputs_at
    keys_at = scores_at + KEYS * line
    values_at = keys_at + 4 * KEYS * head_dim
    maxima_at = values_at + 4 * KEYS * head_dim
    sums_at, scales_at, positions_at = maxima_at + line, maxima_at + 2 * line, maxima_at + 3 * line
    dummy_at = positions_at + line
    addresses_at = dummy_at + 4 * head_dim

    def body(args, tid, threads):
        a = record(args, DECODE)
        cu, kv_lens, slots = i32(a.cu_seqlens, a.segments + 1), i32(a.kv_lens, a.segments), i32(a.slots, a.segments)
        queries = a.scratch + 4 * tid * a.scratch_stride
        outputs, scores, keys, values = (
            queries + outputs_at,
            queries + scores_at,
            queries + keys_at,
            queries + values_at,
        )
        maxima, sums, scales = queries + maxima_at, queries + sums_at, queries + scales_at
        positions = f32(queries + positions_at, LANES)
        sources, targets = i64(queries + addresses_at, LANES), i64(queries + addresses_at + 8 * LANES, LANES)
        scale = splat(as_f32(a.scale * LOG2E))
        row_bytes = 4 * a.kv_heads * group * head_dim

        total = 0  # blocks of keys, of all tiles of one KV head
        for s in range(a.segments):
            rows = cu[s + 1] - cu[s]
            if rows > 1:
                for i in range(0, rows, per_tile):
                    position = kv_lens[s] - rows + i
                    first = 0 if a.window == 0 else max(0, position - a.window + 1)
                    total += (position + min(per_tile, rows - i) - first + KEYS - 1) // KEYS
        begin, end = total * a.kv_heads * tid // threads, total * a.kv_heads * (tid + 1) // threads

        work = 0
        for h in range(a.kv_heads):
            for s in range(a.segments):
                rows = cu[s + 1] - cu[s]
                if rows < 2:
                    continue
                for i in range(0, rows, per_tile):
                    count = min(per_tile, rows - i)
                    position = kv_lens[s] - rows + i
                    first = 0 if a.window == 0 else max(0, position - a.window + 1)
                    last = position + count  # one past the last key
                    start = work
                    work += (last - first + KEYS - 1) // KEYS
                    if start < begin or start >= end:
                        continue

                    panels = (count * group + 15) // 16
                    at = (cu[s] + i) * row_bytes + 4 * h * group * head_dim
                    for lane in range(16 * panels):
                        p, g = lane // group, lane % group
                        if p < count:
                            offset = at + p * row_bytes + 4 * g * head_dim
                            sources[lane], targets[lane] = a.q + offset, a.out + offset
                            positions[lane] = position + p
                        else:  # unused lanes compute the first row and write it aside
                            sources[lane], targets[lane] = a.q + at, queries + dummy_at
                            positions[lane] = position
                    addresses = queries + addresses_at
                    for j in range(panels):
                        for d in range(0, head_dim, 16):
                            transpose(1, addresses + 128 * j, 4 * d, queries + d * line + 64 * j, line)
                        store(maxima + 64 * j, splat(as_f32(NOTHING)))
                        store(sums + 64 * j, splat(as_f32(0.0)))
                    for d in range(0, head_dim * line, line):
                        for j in range(0, 64 * panels, 64):
                            store(queries + d + j, load(queries + d + j) * scale)
                            store(outputs + d + j, splat(as_f32(0.0)))

                    base = slots[s] * a.slot_stride + h * (head_dim * itemsize)
                    for key in range(first, last, KEYS):
                        block = min(KEYS, last - key)
                        padded = (block + 7) // 8 * 8
                        k, v = a.k + base + key * a.pos_stride, a.v + base + key * a.pos_stride
                        for j in range(block):
                            for d in range(0, head_dim, 16):
                                if is_half:
                                    store(keys + 4 * (j * head_dim + d), load_f16(k + 2 * d))
                                    store(values + 4 * (j * head_dim + d), load_f16(v + 2 * d))
                                else:
                                    store(keys + 4 * (j * head_dim + d), load(k + 4 * d))
                                    store(values + 4 * (j * head_dim + d), load(v + 4 * d))
                            k += a.pos_stride
                            v += a.pos_stride
                        for d in range(4 * block * head_dim, 4 * padded * head_dim, 64):
                            store(keys + d, splat(as_f32(0.0)))
                            store(values + d, splat(as_f32(0.0)))

                        if panels == 4 and WIDE == 4:
                            for j in range(0, padded, ROWS):
                                gemm_tile(
                                    ROWS, WIDE, 0, keys + 4 * j * head_dim, 4 * head_dim, 4, queries, line,
                                    scores + j * line, line, head_dim, 0,
                                )  # fmt: skip
                        else:
                            for c in range(0, 64 * panels, 64):
                                for j in range(0, padded, 8):
                                    gemm_tile(
                                        8, 1, 0, keys + 4 * j * head_dim, 4 * head_dim, 4, queries + c, line,
                                        scores + j * line + c, line, head_dim, 0,
                                    )  # fmt: skip

                        causal = key + padded - 1 > position  # some lane must not see some key of the block
                        windowed = a.window > 0 and key <= last - 1 - a.window
                        for c in range(0, 64 * panels, 64):
                            old = load(maxima + c)
                            top = old
                            if causal or windowed:
                                lanes = load(queries + positions_at + c)
                                reach = lanes - splat(as_f32(a.window))
                                for j in range(padded):
                                    here = splat(as_f32(key + j))
                                    score = load(scores + j * line + c)
                                    score = select_gt(here, lanes, splat(as_f32(NOTHING)), score)
                                    if windowed:
                                        score = select_gt(here, reach, score, splat(as_f32(NOTHING)))
                                    store(scores + j * line + c, score)
                                    top = vmax(score, top)
                            else:
                                for j in range(padded):
                                    top = vmax(load(scores + j * line + c), top)
                            added = splat(as_f32(0.0))
                            for j in range(padded):
                                weight = exp2_v(load(scores + j * line + c) - top)
                                added = added + weight
                                store(scores + j * line + c, weight)
                            kept = exp2_v(old - top)
                            store(maxima + c, top)
                            store(scales + c, kept)
                            store(sums + c, load(sums + c) * kept + added)

                        if panels == 4 and WIDE == 4:
                            for d in range(0, head_dim, ROWS):
                                gemm_tile(
                                    ROWS, WIDE, 1, values + 4 * d, 4, 4 * head_dim, scores, line,
                                    outputs + d * line, line, padded, scales,
                                )  # fmt: skip
                        else:
                            for c in range(0, 64 * panels, 64):
                                for d in range(0, head_dim, 8):
                                    gemm_tile(
                                        8, 1, 1, values + 4 * d, 4, 4 * head_dim, scores + c, line,
                                        outputs + d * line + c, line, padded, scales + c,
                                    )  # fmt: skip

                    for j in range(panels):
                        inverse = splat(as_f32(1.0)) / load(sums + 64 * j)
                        for d in range(0, head_dim * line, line):
                            store(outputs + d + 64 * j, load(outputs + d + 64 * j) * inverse)
                        for d in range(0, head_dim, 16):
                            transpose(0, addresses + 8 * LANES + 128 * j, 4 * d, outputs + d * line + 64 * j, line)

    return kernel(decode_layout(np.uint16 if half else np.float32), f"attention_prefill[{group}x{head_dim}]")(body)
