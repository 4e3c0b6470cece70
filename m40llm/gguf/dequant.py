"""NumPy dequantisation of every supported block format: the reference that every kernel is measured against.

Block layouts are those of ggml's ``ggml-common.h``; the order of the float32 operations is that of ggml's
dequantize_row functions, so the results equal the ``gguf`` package's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from m40llm.gguf.types import BLOCKS, TensorType

_CHUNK_WEIGHTS = 1 << 17  # temporaries that stay in the cache, whatever the size of the tensor

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""Code book of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl)."""


def dequantize(data: np.ndarray, kind: TensorType, out: np.ndarray | None = None) -> np.ndarray:
    """Decode quantised rows.

    Args:
        data: (rows, row_bytes) uint8; a row holds whole blocks.
        kind: one of the types in `BLOCKS`.
        out: optional (rows, K) float32 destination, C-contiguous.

    Returns:
        (rows, K) float32, K = row_bytes / type_size · block_size.

    Raises:
        ValueError: unsupported type, or array shapes and dtypes other than these.
    """
    block = BLOCKS.get(kind)
    if block is None:
        raise ValueError(f"tensor type {kind.name} is not supported")
    if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] % block.type_size:
        raise ValueError(f"expected (rows, n·{block.type_size}) uint8 for {kind.name}, got {data.shape} {data.dtype}")
    rows, columns = data.shape[0], data.shape[1] // block.type_size * block.block_size
    if out is None:
        out = np.empty((rows, columns), dtype=np.float32)
    elif out.shape != (rows, columns) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous float32 {(rows, columns)}, got {out.dtype} {out.shape}")
    if not columns:
        return out
    decode = _DECODERS[kind]
    step = max(1, _CHUNK_WEIGHTS // columns)
    # random bit patterns hold infinities and NaNs as scales: 0 · inf is what it is, not a reason to warn
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, rows, step):
            blocks = np.ascontiguousarray(data[start : start + step]).reshape(-1, block.type_size)
            out[start : start + step].reshape(-1, block.block_size)[...] = decode(blocks)
    return out


def _half(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The little-endian float16 at ``byte`` of every block: (n, 1) float32."""
    return np.ascontiguousarray(blocks[:, byte : byte + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, group: int) -> np.ndarray:
    """(n, m) bytes → (n, 2m) uint8: of every ``group`` bytes first all low nibbles, then all high ones."""
    parts = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate((parts & 15, parts >> 4), axis=2).reshape(len(packed), -1)


def _fields(packed: np.ndarray, group: int, bits: int) -> np.ndarray:
    """(n, m) bytes → (n, m·8/bits) uint8: of every ``group`` bytes first all lowest fields, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = (packed.reshape(len(packed), -1, 1, group) >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _fifth_bits(blocks: np.ndarray, byte: int) -> np.ndarray:
    """Bit i of the 4 bytes at ``byte``, moved to 16: (n, 32) uint8."""
    return np.unpackbits(blocks[:, byte : byte + 4], axis=1, bitorder="little") << 4


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8)) * _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 4:], 16) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return (q.view(np.int8) - np.int8(16)) * _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return q * _half(blocks, 0) + _half(blocks, 2)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, d, dmin = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    q = _fields(blocks[:, 16:80], 32, 2).reshape(-1, 16, 16)
    return (q * (d * (scales & 15))[..., None] - (dmin * (scales >> 4))[..., None]).reshape(-1, 256)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, 96:104], 8)
    high = _fields(blocks[:, 104:108], 4, 2)
    scales = ((low | (high << 4)).view(np.int8) - np.int8(32)) * _half(blocks, 108)
    # a set mask bit means "no 4 subtracted"
    q = (_fields(blocks[:, 32:96], 32, 2) | (_fields(blocks[:, :32], 32, 1) << 2)).view(np.int8) - np.int8(4)
    return (q.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of eight 6-bit scales and eight 6-bit minimums: two (n, 8) uint8."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((a & 63, (c & 15) | ((a >> 6) << 4)), axis=1)
    minimums = np.concatenate((b & 63, (c >> 4) | ((b >> 6) << 4)), axis=1)
    return scales, minimums


def _k_affine(blocks: np.ndarray, q: np.ndarray) -> np.ndarray:
    scales, minimums = _k_scales(blocks[:, 4:16])
    d, dmin = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (q.reshape(-1, 8, 32) * d[..., None] - dmin[..., None]).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_affine(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    return _k_affine(blocks, _nibbles(blocks[:, 48:], 32) | (_fields(blocks[:, 16:48], 32, 1) << 4))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    q = (_nibbles(blocks[:, :128], 64) | (_fields(blocks[:, 128:192], 32, 2) << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    return (q.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return IQ4_VALUES[_nibbles(blocks[:, 2:], 16)] * _half(blocks, 0)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    low = _fields(blocks[:, 4:8], 1, 4)
    high = _fields(blocks[:, 2:4], 1, 2)
    scales = ((low | (high << 4)).view(np.int8) - np.int8(32)) * _half(blocks, 0)
    q = IQ4_VALUES[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, 32)
    return (q * scales[..., None]).reshape(-1, 256)


_DECODERS: dict[TensorType, Callable[[np.ndarray], np.ndarray]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
}
