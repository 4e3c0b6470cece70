"""GGUF tensors → the groups of planes that the kernels read. The layout is described, and decoded, in kernels/formats.cuh.

Every packing is lossless: the kernels' dequantisation gives back what `m40llm.gguf.dequantize` gives, bit for bit. Types
without a device format of their own use a wider one: IQ4_NL becomes Q8_0 (its code book has 8-bit values), IQ4_XS the same
with scales per 16, and Q2_K and Q3_K keep their scales but hold their weights in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m40llm.device.buffers import DeviceBuffer
from m40llm.device.protocol import Device
from m40llm.gguf import BLOCKS, GGUFFile, TensorType, dequantize
from m40llm.gguf.dequant import IQ4_VALUES

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

GROUP = 4  # rows that lie together
CHUNK = 32  # units that lie together: one per lane of a warp
UNIT = 32  # weights
_ALIGN = 16  # of a group: its widest load
_MAX_COLUMNS = 1 << 24
_SLAB_BYTES = 16 << 20  # of packed weights at a time: bounds the host memory of a load


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """Sizes of one device format; the numbers are those of the traits in kernels/formats.cuh."""

    name: str  # as in kernel symbols
    ggml: TensorType  # whose number tells mixed kernels what a matrix is
    steps: int  # 16-byte loads per unit
    extra: int  # bytes per unit behind them
    scale: int  # bytes per unit in the scales plane
    super: int  # bytes per 8 units in the supers plane

    @property
    def unit_bytes(self) -> int:
        return 16 * self.steps + self.extra

    def group_bytes(self, columns: int) -> int:
        """Bytes of four rows of `columns` weights."""
        units = -(-columns // UNIT)
        return _aligned(GROUP * (units * (self.unit_bytes + self.scale) + units // 8 * self.super))


@dataclass(frozen=True, slots=True)
class Units:
    """Rows of unpacked blocks, before interleaving. R rows, U units per row."""

    quants: U8  # (R, U, steps, 16)
    extra: U8  # (R, U, extra)
    scales: U8  # (R, U, scale)
    supers: U8  # (R, U // 8, super), or (R, 0, 0)


@dataclass(frozen=True, slots=True)
class CudaMatrix:
    """A packed weight matrix (N, K) on the device. Owns its buffer."""

    name: str
    type: TensorType  # in the file
    fmt: DeviceFormat
    rows: int  # N
    columns: int  # K
    buffer: DeviceBuffer

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def close(self) -> None:
        """Frees the memory; may be called twice."""
        self.buffer.close()


def packed_bytes(kind: TensorType, rows: int, columns: int) -> int:
    """Device memory of a packed (rows, columns) matrix of GGUF type `kind`, in bytes."""
    return -(-rows // GROUP) * FORMATS[kind].group_bytes(columns)


def load_matrix(file: GGUFFile, name: str, device: Device) -> CudaMatrix:
    """Packs tensor `name` (N, K) and uploads it, some rows at a time.

    Raises:
        GGUFError, UnsupportedTypeError: see `GGUFFile.data`.
        OutOfDeviceMemory: the device cannot hold it.
    """
    info = file.tensor(name)
    # Asked for before anything is allocated: it refuses an unknown type.
    file.read_rows(name, 0, 0)
    return _upload(device, name, info.type, info.rows, info.columns, lambda a, b: file.read_rows(name, a, b))


def load_matrix_as_f32(file: GGUFFile, name: str, device: Device) -> CudaMatrix:
    """As `load_matrix`, but dequantised first: four bytes a weight, the same values."""
    info = file.tensor(name)

    def read(first: int, last: int) -> U8:
        return dequantize(file.read_rows(name, first, last), info.type).astype(np.float32, copy=False).view(np.uint8)

    return _upload(device, name, TensorType.F32, info.rows, info.columns, read)


def upload_matrix(device: Device, raw: U8, kind: TensorType, name: str = "matrix") -> CudaMatrix:
    """Packs and uploads rows of GGUF bytes, (N, row bytes) uint8 of type `kind`."""
    block = BLOCKS[kind]
    columns = raw.shape[1] // block.type_size * block.block_size
    return _upload(device, name, kind, raw.shape[0], columns, lambda a, b: raw[a:b])


def _upload(
    device: Device, name: str, kind: TensorType, rows: int, columns: int, read: Callable[[int, int], U8]
) -> CudaMatrix:
    if columns > _MAX_COLUMNS:
        raise ValueError(f"{name} has {columns} columns; the kernels' offsets reach {_MAX_COLUMNS}")
    fmt = FORMATS[kind]
    group_bytes = fmt.group_bytes(columns)
    buffer = device.alloc(packed_bytes(kind, rows, columns), name)
    try:
        step = max(1, _SLAB_BYTES // group_bytes) * GROUP
        for start in range(0, rows, step):
            device.upload(buffer, pack(read(start, min(rows, start + step)), kind), start // GROUP * group_bytes)
    except BaseException:
        buffer.close()
        raise
    return CudaMatrix(name, kind, fmt, rows, columns, buffer)


def pack(raw: U8, kind: TensorType) -> U8:
    """Rows of GGUF bytes, (R, row bytes) uint8, as groups of four rows: (ceil(R / 4), group bytes) uint8.

    The rows are filled up to a multiple of 4 with zero bytes, whose weights nobody reads.
    """
    block, fmt = BLOCKS[kind], FORMATS[kind]
    blocks = np.ascontiguousarray(raw).reshape(-1, block.type_size)
    units = _PACKERS[kind](blocks, raw.shape[0])
    quants = _by_group(units.quants.view(np.uint64))  # (G, 4, U, steps, 2)
    extra = _by_group(units.extra)
    groups, count = quants.shape[0], quants.shape[2]
    out = np.zeros((groups, fmt.group_bytes(count * UNIT)), np.uint8)
    at = 0
    for first, width in ((0, CHUNK), (count - count % CHUNK, count % CHUNK)):  # whole chunks, then the rest
        last = count - count % CHUNK if width == CHUNK else count
        size = GROUP * (last - first) * fmt.unit_bytes
        if size:
            _interleave(quants[:, :, first:last], extra[:, :, first:last], width, out[:, at : at + size], fmt)
        at += size
    for plane in (_by_group(units.scales), _by_group(units.supers)):
        size = plane[0].size
        out[:, at : at + size] = plane.swapaxes(1, 2).reshape(groups, size)
        at += size
    return out


def _interleave(quants: NDArray[np.uint64], extra: U8, width: int, out: U8, fmt: DeviceFormat) -> None:
    """(G, 4, C·width, steps, 2) and (G, 4, C·width, extra) → out (G, C·4·width·unit bytes): step, row, unit; row, unit."""
    groups, chunks = quants.shape[0], quants.shape[2] // width
    view = out.reshape(groups, chunks, -1)  # splits the last axis: never a copy
    main = GROUP * width * 16 * fmt.steps
    q = quants.reshape(groups, GROUP, chunks, width, fmt.steps, 2).transpose(0, 2, 4, 1, 3, 5)
    view[:, :, :main] = np.ascontiguousarray(q).view(np.uint8).reshape(groups, chunks, main)
    if fmt.extra:
        e = extra.reshape(groups, GROUP, chunks, width, fmt.extra).transpose(0, 2, 1, 3, 4)
        view[:, :, main:] = e.reshape(groups, chunks, -1)


def _by_group(rows: NDArray[Any]) -> NDArray[Any]:
    """(R, …) → (ceil(R / 4), 4, …), filled up with zeros."""
    missing = -rows.shape[0] % GROUP
    if missing:
        rows = np.concatenate((rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)))
    return rows.reshape(rows.shape[0] // GROUP, GROUP, *rows.shape[1:])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# -- from blocks to units ------------------------------------------------------------------------------


def _units(rows: int, quants: NDArray[Any], scales: NDArray[Any], supers: NDArray[Any] | None = None) -> Units:
    """Sorts the bytes of all units of `rows` rows; `quants` is (units, …) with 16·steps + extra bytes each."""
    count = len(quants) // rows
    flat = np.ascontiguousarray(quants).view(np.uint8).reshape(rows, count, -1)
    main = flat.shape[2] // 16 * 16
    packed = np.ascontiguousarray(flat[:, :, :main]).reshape(rows, count, main // 16, 16)
    scale = np.ascontiguousarray(scales).view(np.uint8)
    scale = scale.reshape(rows, count, scale.size // (rows * count))
    if supers is None:
        return Units(packed, flat[:, :, main:], scale, np.empty((rows, 0, 0), np.uint8))
    top = np.ascontiguousarray(supers).view(np.uint8).reshape(rows, count // 8, -1)
    return Units(packed, flat[:, :, main:], scale, top)


def _fields(packed: U8, group: int, bits: int) -> NDArray[Any]:
    """(n, m) → (n, m·8/bits): of every `group` bytes first all lowest fields of `bits` bits, then the next (ggml's order)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = packed.reshape(len(packed), -1, 1, group) >> shifts & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _nibble_bytes(weights: NDArray[Any]) -> NDArray[Any]:
    """(n, 32·m) 4-bit weights → (n·m, 16): see Bits4."""
    pieces = weights.reshape(-1, 4, 2, 4)
    return (pieces[:, :, 0] | pieces[:, :, 1] << 4).reshape(-1, 16)


def _placed(weights: NDArray[Any], at: tuple[int, ...], bits: int) -> U32:
    """(n, 32) → (n,): the weights numbered `at`, each `bits` higher than the one before."""
    word = weights[:, at[0]].astype(np.uint32)
    for i, k in enumerate(at[1:], 1):
        word |= weights[:, k].astype(np.uint32) << np.uint32(bits * i)
    return word


def _five_bit_words(weights: NDArray[Any]) -> U32:
    """(n, 32·m) 5-bit weights → (n·m, 5): see Bits5."""
    e = weights.reshape(-1, 32)
    last = _placed(e, (30, 31), 5)
    words = [
        _placed(e, (4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3, 20 + 2 * i, 21 + 2 * i), 5)
        | (last >> np.uint32(2 * i) & np.uint32(3)) << np.uint32(30)
        for i in range(5)
    ]
    return np.stack(words, axis=1)


def _six_bit_words(weights: NDArray[Any]) -> U32:
    """(n, 32·m) 6-bit weights → (n·m, 6): see Bits6."""
    e = weights.reshape(-1, 32)
    words = []
    for half in (0, 16):
        top = _placed(e, (half + 12, half + 13, half + 14, half + 15), 6)
        for i in range(3):
            low = _placed(e, (half + 4 * i, half + 4 * i + 1, half + 4 * i + 2, half + 4 * i + 3), 6)
            words.append(low | (top >> np.uint32(8 * i) & np.uint32(255)) << np.uint32(24))
    return np.stack(words, axis=1)


def _float_units(dtype: str) -> Callable[[U8, int], Units]:
    def packer(blocks: U8, rows: int) -> Units:
        values = blocks.reshape(rows, -1).view(dtype)
        missing = -values.shape[1] % UNIT
        if missing:
            values = np.concatenate((values, np.zeros((rows, missing), values.dtype)), axis=1)
        units = values.reshape(-1, UNIT)
        return _units(rows, units, np.empty((len(units), 0), np.uint8))

    return packer


def _q8_0(blocks: U8, rows: int) -> Units:
    return _units(rows, blocks[:, 2:] ^ np.uint8(128), blocks[:, :2])


def _q4_0(blocks: U8, rows: int) -> Units:
    return _units(rows, _nibble_bytes(_fields(blocks[:, 2:], 16, 4)), blocks[:, :2])


def _q4_1(blocks: U8, rows: int) -> Units:
    return _units(rows, _nibble_bytes(_fields(blocks[:, 4:], 16, 4)), blocks[:, :4])


def _fifth_bits(blocks: U8, byte: int) -> NDArray[Any]:
    return np.unpackbits(blocks[:, byte : byte + 4], axis=1, bitorder="little") << 4


def _q5_0(blocks: U8, rows: int) -> Units:
    return _units(rows, _five_bit_words(_fields(blocks[:, 6:], 16, 4) | _fifth_bits(blocks, 2)), blocks[:, :2])


def _q5_1(blocks: U8, rows: int) -> Units:
    return _units(rows, _five_bit_words(_fields(blocks[:, 8:], 16, 4) | _fifth_bits(blocks, 4)), blocks[:, :4])


def _q2_k(blocks: U8, rows: int) -> Units:
    return _units(rows, _nibble_bytes(_fields(blocks[:, 16:80], 32, 2)), blocks[:, :16], blocks[:, 80:84])


def _q3_k(blocks: U8, rows: int) -> Units:
    weights = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    scales = (_fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << 4) - np.uint8(32)
    return _units(rows, _nibble_bytes(weights), scales, blocks[:, 108:110])


def _k_scales(blocks: U8) -> U8:
    """Eight (scale, minimum) byte pairs from bytes 4..15: (n, 8, 2)."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((a & 63, (c & 15) | (a >> 6) << 4), axis=1)
    minimums = np.concatenate((b & 63, (c >> 4) | (b >> 6) << 4), axis=1)
    return np.stack((scales, minimums), axis=2)


def _q4_k(blocks: U8, rows: int) -> Units:
    return _units(rows, _nibble_bytes(_fields(blocks[:, 16:], 32, 4)), _k_scales(blocks), blocks[:, :4])


def _q5_k(blocks: U8, rows: int) -> Units:
    weights = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4
    return _units(rows, _five_bit_words(weights), _k_scales(blocks), blocks[:, :4])


def _q6_k(blocks: U8, rows: int) -> Units:
    weights = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << 4
    return _units(rows, _six_bit_words(weights), blocks[:, 192:208], blocks[:, 208:210])


_IQ4_BYTES = IQ4_VALUES.view(np.uint8) ^ np.uint8(128)


def _iq4_nl(blocks: U8, rows: int) -> Units:
    return _units(rows, _IQ4_BYTES[_fields(blocks[:, 2:], 16, 4)], blocks[:, :2])


def _iq4_xs(blocks: U8, rows: int) -> Units:
    weights = _IQ4_BYTES[_fields(blocks[:, 8:], 16, 4)].reshape(-1, UNIT)
    scales = (_fields(blocks[:, 4:8], 1, 4) | _fields(blocks[:, 2:4], 1, 2) << 4) - np.uint8(32)
    return _units(rows, weights, np.repeat(scales.reshape(-1, 1), 2, axis=1), blocks[:, :2])


_Q8_0 = DeviceFormat("q8_0", TensorType.Q8_0, 2, 0, 2, 0)

FORMATS: dict[TensorType, DeviceFormat] = {
    TensorType.F32: DeviceFormat("f32", TensorType.F32, 8, 0, 0, 0),
    TensorType.F16: DeviceFormat("f16", TensorType.F16, 4, 0, 0, 0),
    TensorType.BF16: DeviceFormat("bf16", TensorType.BF16, 4, 0, 0, 0),
    TensorType.Q8_0: _Q8_0,
    TensorType.Q4_0: DeviceFormat("q4_0", TensorType.Q4_0, 1, 0, 2, 0),
    TensorType.Q4_1: DeviceFormat("q4_1", TensorType.Q4_1, 1, 0, 4, 0),
    TensorType.Q5_0: DeviceFormat("q5_0", TensorType.Q5_0, 1, 4, 2, 0),
    TensorType.Q5_1: DeviceFormat("q5_1", TensorType.Q5_1, 1, 4, 4, 0),
    TensorType.Q2_K: DeviceFormat("q2_k", TensorType.Q2_K, 1, 0, 2, 4),
    TensorType.Q3_K: DeviceFormat("q3_k", TensorType.Q3_K, 1, 0, 2, 2),
    TensorType.Q4_K: DeviceFormat("q4_k", TensorType.Q4_K, 1, 0, 2, 4),
    TensorType.Q5_K: DeviceFormat("q5_k", TensorType.Q5_K, 1, 4, 2, 4),
    TensorType.Q6_K: DeviceFormat("q6_k", TensorType.Q6_K, 1, 8, 2, 2),
    TensorType.IQ4_NL: _Q8_0,
    TensorType.IQ4_XS: DeviceFormat("iq4_xs", TensorType.IQ4_XS, 2, 0, 2, 2),
}
"""The device format of every supported GGUF type."""

_PACKERS: dict[TensorType, Callable[[U8, int], Units]] = {
    TensorType.F32: _float_units("<u4"),
    TensorType.F16: _float_units("<u2"),
    TensorType.BF16: _float_units("<u2"),
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
