"""From rows as a GGUF file has them to packed matrices (formats.py), in compiled code on all threads."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cpu.arena import Arena
from m40llm.ops.cpu.attention_tiles import transpose
from m40llm.ops.cpu.formats import BLOCK, FLOATS, FORMATS, ROWS
from m40llm.ops.cpu.intrinsics import call4, i64, record, stack, u8, u16, u32
from m40llm.ops.cpu.program import Kernel, Program, Workers, kernel, layout, pointer
from m40llm.ops.cpu.unblock import UNBLOCKERS

__all__ = ["PackedMatrix", "ReadRows", "pack_matrix"]

ReadRows = Callable[[int, int], np.ndarray]
BUFFER = ROWS * 4 * ROWS * 8  # bytes of the words that pack_rows makes before it places them, with 8 bits
SLICE_BYTES = 8 << 20  # of raw rows at a time: the file's pages need not all be in memory


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix (n, k) ready for projections.

    quants (groups, bytes) uint8: integers in bit planes, or the elements of float types. scales (groups, bytes) uint8:
    empty for float types. Groups are of 16 rows; rows past n are zero.
    """

    n: int
    k: int
    type: TensorType
    quants: np.ndarray
    scales: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes


PACK = layout(
    unblock=np.int64,
    raw=pointer(np.uint8),
    row_bytes=np.int64,
    rows=np.int64,
    block_bytes=np.int64,
    units=np.int64,
    halves=np.int64,
    small=np.int64,
    quants=pointer(np.uint8),
    scales=pointer(np.uint8),
)


@functools.cache
def pack_rows(low_bits: int, high_bits: int, unit: int) -> Kernel:
    """The kernel from rows of blocks to groups for one choice of planes and unit; each thread takes a range of groups.

    These are constants, so that the loops over words unroll. Words are made row by row, side by side, and reach their places
    16 rows by 16 words at a time: one by one they would be 4 bytes in every cache line of the group.
    """
    blocks = unit // BLOCK
    words = blocks * (low_bits + high_bits)  # per unit and row
    low_fields, low_mask = 8 // low_bits, ((1 << low_bits) - 1) * 0x01010101
    high_fields, high_mask = 8 // high_bits if high_bits else 1, ((1 << high_bits) - 1) * 0x01010101
    many = max(1, ROWS // blocks)  # units at a time: their words fill whole tiles
    pitch = 4 * many * words

    def body(args, tid, threads):
        a = record(args, PACK)
        groups = (a.rows + ROWS - 1) // ROWS
        q_at, halves_at, small_at = stack(256), stack(16), stack(64)
        quads, halves, small = u32(q_at, 64), u16(halves_at, 2), u8(small_at, 32)
        rows_at, addresses_at = stack(BUFFER), stack(128)
        addresses = i64(addresses_at, ROWS)
        for lane in range(ROWS):
            addresses[lane] = rows_at + lane * pitch
        record_bytes = ROWS * (2 * a.halves + a.small)
        for g in range(tid * groups // threads, (tid + 1) * groups // threads):
            lanes = min(ROWS, a.rows - g * ROWS)
            unused = u32(rows_at + lanes * pitch, (ROWS - lanes) * pitch // 4)
            for i in range((ROWS - lanes) * pitch // 4):
                unused[i] = 0
            for first in range(0, a.units, many):
                count = min(many, a.units - first)
                for lane in range(lanes):
                    row = a.raw + (g * ROWS + lane) * a.row_bytes
                    made = u32(addresses[lane], many * words)
                    for i in range(count):
                        call4(a.unblock, row + (first + i) * a.block_bytes, q_at, halves_at, small_at)
                        scales = a.scales + (g * a.units + first + i) * record_bytes
                        to16 = u16(scales, ROWS * a.halves)
                        for j in range(a.halves):
                            to16[ROWS * j + lane] = halves[j]
                        to8 = u8(scales + 2 * ROWS * a.halves, ROWS * a.small)
                        for j in range(a.small):
                            to8[ROWS * j + lane] = small[j]
                        at = i * words
                        for block in range(blocks):
                            for e in range(low_bits):
                                word = np.uint32(0)
                                for f in range(low_fields):
                                    part = quads[8 * block + e * low_fields + f] & np.uint32(low_mask)
                                    word |= part << np.uint32(low_bits * f)
                                made[at + e] = word
                            at += low_bits
                            for e in range(high_bits):
                                word = np.uint32(0)
                                for f in range(high_fields):
                                    part = quads[8 * block + e * high_fields + f] >> np.uint32(low_bits)
                                    word |= (part & np.uint32(high_mask)) << np.uint32(high_bits * f)
                                made[at + e] = word
                            at += high_bits
                to = a.quants + 4 * ROWS * words * (g * a.units + first)
                whole = count * words // ROWS * ROWS
                for w in range(0, whole, ROWS):
                    transpose(1, addresses_at, 4 * w, to + 4 * ROWS * w, 4 * ROWS)
                quants = u32(to, ROWS * count * words)
                for lane in range(ROWS):
                    made = u32(addresses[lane], count * words)
                    for w in range(whole, count * words):
                        quants[ROWS * w + lane] = made[w]

    return kernel(PACK, f"pack planes of {low_bits}+{high_bits} bits, {unit}")(body)


TRANSPOSE = layout(
    raw=pointer(np.uint8), rows=np.int64, k=np.int64, size=np.int64, row_bytes=np.int64, out=pointer(np.uint8)
)


@kernel(TRANSPOSE)
def transpose_rows(args, tid, threads):
    """Rows of 2- or 4-byte elements to groups [k][16]."""
    a = record(args, TRANSPOSE)
    groups = (a.rows + ROWS - 1) // ROWS
    for g in range(tid * groups // threads, (tid + 1) * groups // threads):
        for lane in range(min(ROWS, a.rows - g * ROWS)):
            row = a.raw + (g * ROWS + lane) * a.row_bytes
            out = a.out + g * ROWS * a.k * a.size
            if a.size == 2:
                from16, to16 = u16(row, a.k), u16(out, ROWS * a.k)
                for k in range(a.k):
                    to16[ROWS * k + lane] = from16[k]
            else:
                from32, to32 = u32(row, a.k), u32(out, ROWS * a.k)
                for k in range(a.k):
                    to32[ROWS * k + lane] = from32[k]


def pack_matrix(
    read_rows: ReadRows,
    tensor_type: TensorType,
    n: int,
    k: int,
    workers: Workers,
    on_compile: Callable[[str], None] | None = None,
    arena: Arena | None = None,
) -> PackedMatrix:
    """Pack an (n, k) matrix.

    read_rows(start, stop) returns those rows as uint8 (stop - start, row bytes), C-contiguous; it is asked for slices of
    a few MB. arena: where the result is allocated (None: an own one).
    Raises ValueError for an unsupported type and for a k that is no multiple of the type's block.
    """
    if tensor_type not in BLOCKS:
        raise ValueError(f"tensor type {tensor_type.name} has no projection kernel")
    row_bytes = BLOCKS[tensor_type].row_bytes(k)
    form = FORMATS.get(tensor_type)
    groups = -(-n // ROWS)
    quants_bytes, scales_bytes = form.group_bytes(k) if form else (ROWS * k * FLOATS[tensor_type], 0)
    arena = arena or Arena()
    quants = arena.empty((groups, quants_bytes))
    scales = arena.empty((groups, scales_bytes))
    if n % ROWS:
        quants[-1:], scales[-1:] = 0, 0
    step = max(1, SLICE_BYTES // (ROWS * row_bytes)) * ROWS
    for start in range(0, n, step):
        stop = min(n, start + step)
        raw = read_rows(start, stop)
        if raw.shape != (stop - start, row_bytes) or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
            raise ValueError(
                f"rows {start} to {stop} came as {raw.dtype} {raw.shape}, not ({stop - start}, {row_bytes})"
            )
        program = Program(on_compile)
        to_quants = quants[start // ROWS :]
        if form is None:
            size = FLOATS[tensor_type]
            program.add(transpose_rows, raw=raw, rows=stop - start, k=k, size=size, row_bytes=row_bytes, out=to_quants)
        else:
            fields = 2 if form.has_min else 1
            program.add(
                pack_rows(form.planes[0], form.planes[1] if len(form.planes) > 1 else 0, form.unit),
                unblock=UNBLOCKERS[tensor_type].address(on_compile),
                raw=raw,
                row_bytes=row_bytes,
                rows=stop - start,
                block_bytes=BLOCKS[tensor_type].type_size,
                units=k // form.unit,
                halves=fields,
                small=0 if form.unit == BLOCK else form.unit // form.sub * fields,
                quants=to_quants,
                scales=scales[start // ROWS :],
            )
        program.run(workers)
    return PackedMatrix(n, k, tensor_type, quants, scales)
