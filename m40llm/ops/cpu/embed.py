"""Token embedding: rows of a table in the file's own quantisation, dequantised bit for bit as by `m40llm.gguf.dequantize`."""

import functools

import numba
import numpy as np

from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cpu.intrinsics import f16_to_f32, f32, i8, i32, record, u8, u16
from m40llm.ops.cpu.program import Kernel, kernel, layout, pointer
from m40llm.ops.cpu.simd import as_f32, bits_to_f32

__all__ = ["embed"]

EMBED = layout(
    table=pointer(np.uint8),  # (V, row_bytes), for instance a view of the mapped file
    token_ids=pointer(np.int32),  # (T,)
    x=pointer(np.float32),  # (T, D)
    rows=np.int64,  # T
    width=np.int64,  # D
)
F32, F16, BF16, Q8_0 = (int(TensorType[name]) for name in ("F32", "F16", "BF16", "Q8_0"))
Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL = (int(TensorType[name]) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"))
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = (int(TensorType[f"Q{bits}_K"]) for bits in range(2, 7))
CODE_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl, ggml-common.h
helper = numba.njit(_nrt=False, error_model="numpy", boundscheck=False)


@helper
def _half(address):
    return f16_to_f32(u16(address, 1)[0])


@helper
def _k_scales(packed, j):
    """The j-th of eight 6-bit scales and minimums in 12 bytes (ggml's get_scale_min_k4), as float32."""
    if j < 4:
        return as_f32(packed[j] & 63), as_f32(packed[j + 4] & 63)
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
    return as_f32(scale), as_f32((packed[j + 4] >> 4) | (packed[j] >> 6 << 4))


@helper
def _number(b, y, kind):
    if kind == F32:
        y[0] = f32(b, 1)[0]
    elif kind == F16:
        y[0] = _half(b)
    else:  # BF16
        y[0] = bits_to_f32(np.uint32(u16(b, 1)[0]) << 16)


@helper
def _block_of_32(b, y, kind):
    """Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: a scale, maybe a minimum, maybe fifth bits, then the quants."""
    d, m = _half(b), as_f32(0.0)
    if kind == Q8_0:
        q = i8(b + 2, 32)
        for i in range(32):
            y[i] = as_f32(q[i]) * d
        return
    fifth, q, bias = np.int64(0), u8(b + 2, 16), 8
    if kind in (Q4_1, Q5_1):
        m = _half(b + 2)
        q, bias = u8(b + 4, 16), 0
    if kind == Q5_0:
        fifth, q, bias = np.int64(u16(b + 2, 1)[0]) | (np.int64(u16(b + 4, 1)[0]) << 16), u8(b + 6, 16), 16
    if kind == Q5_1:
        fifth, q = np.int64(u16(b + 4, 1)[0]) | (np.int64(u16(b + 6, 1)[0]) << 16), u8(b + 8, 16)
    for i in range(16):
        low, high = np.int64(q[i] & 15), np.int64(q[i] >> 4)
        if kind == IQ4_NL:
            y[i], y[i + 16] = as_f32(CODE_BOOK[low]) * d, as_f32(CODE_BOOK[high]) * d
        else:
            low |= (fifth >> i & 1) << 4
            high |= (fifth >> (i + 16) & 1) << 4
            y[i], y[i + 16] = as_f32(low - bias) * d, as_f32(high - bias) * d
            if kind in (Q4_1, Q5_1):
                y[i] += m
                y[i + 16] += m


@helper
def _block_of_256(b, y, kind):
    """The K-quants and IQ4_XS (layouts: ggml-common.h)."""
    if kind == Q2_K:
        scales, q, d, dmin = u8(b, 16), u8(b + 16, 64), _half(b + 80), _half(b + 82)
        for i in range(256):
            s = scales[i // 16]
            value = q[i // 128 * 32 + i % 32] >> (i // 32 % 4 * 2) & 3
            y[i] = as_f32(value) * (d * as_f32(s & 15)) - dmin * as_f32(s >> 4)
    elif kind == Q3_K:
        mask, q, scales, d = u8(b, 32), u8(b + 32, 64), u8(b + 96, 12), _half(b + 108)
        for i in range(256):
            j = i // 16
            low = scales[j % 8] >> (j // 8 * 4) & 15
            high = scales[8 + j % 4] >> (j // 4 * 2) & 3
            value = q[i // 128 * 32 + i % 32] >> (i // 32 % 4 * 2) & 3
            kept = mask[i % 32] >> (i // 32) & 1
            y[i] = as_f32(np.int64(value | kept << 2) - 4) * (as_f32(np.int64(low | high << 4) - 32) * d)
    elif kind in (Q4_K, Q5_K):
        d, dmin, packed = _half(b), _half(b + 2), u8(b + 4, 12)
        fifth, q = u8(b + 16, 32), u8(b + (16 if kind == Q4_K else 48), 128)
        for j in range(8):
            scale, minimum = _k_scales(packed, j)
            scale, minimum = d * scale, dmin * minimum
            for i in range(32):
                value = q[j // 2 * 32 + i] >> (j % 2 * 4) & 15
                if kind == Q5_K:
                    value |= (fifth[i] >> j & 1) << 4
                y[32 * j + i] = as_f32(value) * scale - minimum
    elif kind == Q6_K:
        low, high, scales, d = u8(b, 128), u8(b + 128, 64), i8(b + 192, 16), _half(b + 208)
        for i in range(256):
            value = low[i // 128 * 64 + i % 64] >> (i // 64 % 2 * 4) & 15
            value |= (high[i // 128 * 32 + i % 32] >> (i // 32 % 4 * 2) & 3) << 4
            y[i] = as_f32(np.int64(value) - 32) * (as_f32(scales[i // 16]) * d)
    else:  # IQ4_XS
        d, high, low, q = _half(b), np.int64(u16(b + 2, 1)[0]), u8(b + 4, 4), u8(b + 8, 128)
        for j in range(8):
            scale = np.int64(low[j // 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4
            factor = as_f32(scale - 32) * d
            for i in range(32):
                y[32 * j + i] = as_f32(CODE_BOOK[q[16 * j + i % 16] >> (i // 16 * 4) & 15]) * factor


@functools.cache
def embed(kind: TensorType) -> Kernel:
    """The kernel for a table of this type: x[t] = row token_ids[t], float32. Blocks are shared out over threads.

    Raises ValueError for a type that is not in `BLOCKS`.
    """
    if kind not in BLOCKS:
        raise ValueError(f"tensor type {kind.name} is not supported")
    code = int(kind)
    size, bytes_per_block = BLOCKS[kind]

    def body(args, tid, threads):
        a = record(args, EMBED)
        token_ids = i32(a.token_ids, a.rows)
        blocks = a.width // size
        for unit in range(a.rows * blocks * tid // threads, a.rows * blocks * (tid + 1) // threads):
            t, i = unit // blocks, unit % blocks
            b = a.table + (token_ids[t] * blocks + i) * bytes_per_block
            y = f32(a.x + 4 * (t * a.width + i * size), size)
            if size == 1:
                _number(b, y, code)
            elif size == 32:
                _block_of_32(b, y, code)
            else:
                _block_of_256(b, y, code)

    return kernel(EMBED, f"embed[{kind.name.lower()}]")(body)
