"""Activations for projections: float32 rows to 16-bit integers per block of 32, in the tile layout of tile.py.

x = sx * v with sx = max|x| / (127 * 256 + 127): the error is at most max|x| / 65278 per element, 1/257 of that of 8-bit
activations. With `fine`, what is left of x is quantised in the same way into tiles of its own, and projections add both
products: 32 bits of the largest value of a block, for twice the work. Rows are packed in tiles of 8, the rest in one tile
of 1, 2, 4 or 8 whose last rows may be unused.

RMSNorm is done on the way where the input is a norm's output: every thread sums up the rows that it has a part of, which
takes less time than one more kernel and the threads' meeting after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from m40llm.ops.cpu.formats import BLOCK
from m40llm.ops.cpu.intrinsics import f32, i32, record, stack
from m40llm.ops.cpu.isa import ISA
from m40llm.ops.cpu.program import Program, aligned_empty, kernel, layout, pointer
from m40llm.ops.cpu.simd import as_f32, load, splat, store, sum_squares
from m40llm.ops.cpu.tile import META, NEGATIVE_SUM, SCALED_SUM, TILE_TOKENS, WHOLE, block_bytes

__all__ = ["TILE", "Norm", "QuantisedRows", "record_quantise", "rest_tokens"]

TILE = max(TILE_TOKENS)
LARGEST = 127 * 256 + 127
SMALLEST = 1e-30  # blocks below it count as zero: 1 / sx must stay finite
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VI, VF = ir.VectorType(I32, 16), ir.VectorType(F32, 16)
TILE_BLOCK_BYTES = block_bytes(1)


def rest_tokens(rows: int) -> int:
    """Token count of the last tile, which holds the rows past the last full tile of 8; 0 without one."""
    rest = rows % TILE
    return min(tokens for tokens in TILE_TOKENS if tokens >= rest) if rest else 0


@intrinsic(prefer_literal=True)
def _quantise_block(typingctx, split, x, out, width, token, left):
    """One block of 32: float32 at x into the tile block at ``out`` of ``width`` tokens.

    ``split`` (literal): hi and lo bytes. ``left`` (32 float32, or 0) takes what the integers do not say of x.
    """
    bytes_apart = bool(split.literal_value)

    def codegen(context, b, sig, args):
        _, x, out, width, token, left = args

        def call(name, result, *values):
            kind = ir.FunctionType(result, [v.type for v in values])
            return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)

        def splat(value, vector):
            first = b.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
            return b.shuffle_vector(first, first, ir.Constant(VI, [0] * 16))

        def constant(value):
            return ir.Constant(VI, [value] * 16)

        def put(value, address):
            b.store(value, b.inttoptr(address, value.type.as_pointer()))

        parts, sizes = [], []
        for half in (0, 64):
            loaded = b.load(b.inttoptr(b.add(x, I64(half)), VF.as_pointer()))
            loaded.align = 4
            parts.append(loaded)
            sizes.append(b.and_(b.bitcast(loaded, VI), constant(0x7FFFFFFF)))
        # bits of positive floats are ordered as the floats are, and integers have a maximum in one instruction
        most = b.select(b.icmp_signed(">", *sizes), *sizes)
        largest = b.bitcast(call("llvm.vector.reduce.smax.v16i32", I32, most), F32)
        tiny = b.fcmp_ordered("<", largest, ir.Constant(F32, SMALLEST))
        sx = b.select(tiny, ir.Constant(F32, 0.0), b.fdiv(largest, ir.Constant(F32, float(LARGEST))))
        inverse = b.select(tiny, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, float(LARGEST)), largest))
        sums = []
        for half, part in enumerate(parts):
            scaled = b.fmul(part, splat(inverse, VF))
            v = b.fptosi(call("llvm.rint.v16f32", VF, scaled), VI)
            sums.append(call("llvm.vector.reduce.add.v16i32", I32, v))
            with b.if_then(b.icmp_signed("!=", left, I64(0))):
                rest = call("llvm.fma.v16f32", VF, splat(b.fneg(sx), VF), b.sitofp(v, VF), part)
                b.store(rest, b.inttoptr(b.add(left, I64(64 * half)), VF.as_pointer())).align = 4
            if bytes_apart:
                high = b.ashr(b.add(v, constant(128)), constant(8))
                low = b.sub(v, b.shl(high, constant(8)))
                dwords = [b.bitcast(b.trunc(p, ir.VectorType(I8, 16)), ir.VectorType(I32, 4)) for p in (high, low)]
                order = [0, 4, 1, 5, 2, 6, 3, 7]
                pairs = b.shuffle_vector(*dwords, ir.Constant(ir.VectorType(I32, 8), order))
            else:
                order = [4 * quad + i for quad in range(4) for i in (0, 2, 1, 3)]
                shorts = b.trunc(v, ir.VectorType(I16, 16))
                pairs = b.shuffle_vector(shorts, shorts, ir.Constant(VI, order))
            words = b.bitcast(pairs, ir.VectorType(I64, 4))
            for quad in range(4):
                place = b.add(b.mul(width, I64(8 * (4 * half + quad))), b.mul(token, I64(8)))
                put(b.extract_element(words, I32(quad)), b.add(out, place))
        meta = b.add(out, b.add(b.mul(width, I64(2 * BLOCK)), b.mul(token, I64(4))))
        sums.append(b.add(*sums))

        def put_meta(value, row):
            put(value, b.add(meta, b.mul(width, I64(4 * row))))

        put_meta(sx, 0)
        for i, total in enumerate(sums):
            put_meta(b.neg(total), NEGATIVE_SUM + i)
            put_meta(b.fmul(b.sitofp(total, F32), sx), SCALED_SUM + i)
        return context.get_dummy_value()

    return types.void(split, *[types.int64] * 5), codegen


assert META == 8 and WHOLE == 2  # noqa: PT018  # what put_meta fills above

QUANTISE = layout(
    x=pointer(np.float32),
    stride=np.int64,  # of x, in elements
    index=pointer(np.int32),  # which rows of x; null: all, in order
    rows=np.int64,
    rest=np.int64,
    blocks=np.int64,
    tiles=pointer(np.uint8),
    fine=pointer(np.uint8),  # tiles of what is left; null: not wanted
    norm=pointer(np.float32),  # (K,) weight of an RMSNorm of x; null: none
    eps=np.float64,
)


def _quantiser(split: bool) -> Callable[[int, int, int], None]:
    literal = int(split)

    def quantise(args, tid, threads):
        a = record(args, QUANTISE)
        index = i32(a.index, a.rows)
        normed, left = stack(128), stack(128)  # 32 float32
        scales, scaled = f32(stack(64), TILE), -1  # of the norms of a tile's rows, and which tile's
        # Work is cut over tiles and blocks, so that one row also keeps all threads busy; a block of a tile is written whole.
        count = (a.rows + TILE - 1) // TILE * a.blocks
        for item in range(tid * count // threads, (tid + 1) * count // threads):
            first, block = item // a.blocks * TILE, item % a.blocks
            tokens = min(TILE, a.rows - first)
            width = TILE if tokens == TILE else a.rest
            at = (first * a.blocks + block * width) * TILE_BLOCK_BYTES
            for t in range(tokens):
                row = a.x + 4 * a.stride * (index[first + t] if a.index != 0 else first + t)
                x = row + 4 * BLOCK * block
                if a.norm != 0:
                    if first != scaled:
                        mean = sum_squares(row, BLOCK * a.blocks) / (BLOCK * a.blocks)
                        scales[t] = as_f32(1.0 / np.sqrt(mean + a.eps))
                    for i in range(0, 4 * BLOCK, 64):
                        store(normed + i, load(x + i) * splat(scales[t]) * load(a.norm + 4 * BLOCK * block + i))
                    x = normed
                _quantise_block(literal, x, a.tiles + at, width, t, left if a.fine != 0 else 0)
                if a.fine != 0:
                    _quantise_block(literal, left, a.fine + at, width, t, 0)
            scaled = first

    return quantise


QUANTISERS = {
    split: kernel(QUANTISE, f"quantise {'int8 pairs' if split else 'int16'}")(_quantiser(split))
    for split in (True, False)
}

COPY = layout(
    x=pointer(np.float32),
    stride=np.int64,
    index=pointer(np.int32),
    rows=np.int64,
    rest=np.int64,
    k=np.int64,
    tiles=pointer(np.float32),
)


@kernel(COPY)
def tile_floats(args, tid, threads):
    """Rows into tiles [k][tokens], for float weights."""
    a = record(args, COPY)
    index = i32(a.index, a.rows)
    full = a.rows // TILE * TILE
    for t in range(a.rows):
        row = index[t] if a.index != 0 else t
        first = t // TILE * TILE
        width = TILE if t < full else a.rest
        x = f32(a.x + row * a.stride * 4, a.k)
        out = f32(a.tiles + first * a.k * 4, width * a.k)
        for k in range(tid * a.k // threads, (tid + 1) * a.k // threads):
            out[k * width + t - first] = x[k]


@dataclass(frozen=True)
class Norm:
    """RMSNorm on the way to the integers: weight (K,) float32."""

    weight: np.ndarray
    eps: float


@dataclass
class QuantisedRows:
    """Scratch for the input of projections: up to ``max_rows`` rows of up to ``max_k`` values, for one instruction set.

    It holds one input at a time. ``record_quantise`` names the input; the projections that follow in the same program
    read it, so x must not change between the two.
    """

    max_rows: int
    max_k: int
    isa: ISA
    fine: bool = False  # 32 instead of 16 bits
    tiles: np.ndarray = field(init=False)
    fine_tiles: np.ndarray | None = field(init=False, default=None)
    floats: np.ndarray | None = field(init=False, default=None)  # only models with float matrices need it

    def __post_init__(self) -> None:
        self.padded_rows = -(-self.max_rows // TILE) * TILE
        size = self.padded_rows * -(-self.max_k // BLOCK) * TILE_BLOCK_BYTES
        self.tiles = aligned_empty(size, np.uint8)
        self.fine_tiles = aligned_empty(size, np.uint8) if self.fine else None
        self._source: tuple[np.ndarray, np.ndarray | None, int] | None = None
        self._norm: Norm | None = None
        self._ready: set[bool] = set()

    @property
    def fine_offset(self) -> int:
        """Bytes from `tiles` to the tiles of what their integers leave; 0 where there are none."""
        return 0 if self.fine_tiles is None else self.fine_tiles.ctypes.data - self.tiles.ctypes.data

    def name_source(self, x: np.ndarray, rows: np.ndarray | None, norm: Norm | None) -> None:
        count = len(x) if rows is None else len(rows)
        if x.ndim != 2 or x.dtype != np.float32 or x.strides[1] != 4:
            raise ValueError(f"x must be (rows, k) float32 with contiguous rows, not {x.dtype} {x.shape}")
        if not 1 <= count <= self.max_rows or x.shape[1] > self.max_k:
            raise ValueError(
                f"{count} rows of {x.shape[1]} do not fit scratch for {self.max_rows} rows of {self.max_k}"
            )
        self._source, self._norm, self._ready = (x, rows, count), norm, set()

    def source(self) -> tuple[np.ndarray, int]:
        """The input x and its row count."""
        if self._source is None:
            raise ValueError("record_quantise comes before projections")
        return self._source[0], self._source[2]

    def record(self, program: Program, quantised: bool) -> np.ndarray:
        """The input's tiles, quantised or float32; adds the kernel that fills them, once per input."""
        x, count = self.source()
        index, k = self._source[1] if self._source else None, x.shape[1]
        if not quantised and self._norm is not None:
            raise ValueError("matrices of floats take the output of a norm, not its input")
        if not quantised and self.floats is None:
            self.floats = aligned_empty(self.padded_rows * self.max_k, np.float32)
        tiles = self.tiles if quantised else self.floats
        assert tiles is not None
        if quantised not in self._ready:
            shared: dict[str, Any] = {
                "x": x,
                "stride": x.strides[0] // 4,
                "index": index,
                "rows": count,
                "rest": rest_tokens(count),
            }
            if quantised:
                weight, eps = (self._norm.weight, self._norm.eps) if self._norm else (None, 0.0)
                fields: dict[str, Any] = {"tiles": tiles, "fine": self.fine_tiles, "norm": weight, "eps": eps}
                program.add(QUANTISERS[self.isa.vnni], **shared, blocks=k // BLOCK, **fields)
            else:
                program.add(tile_floats, **shared, k=k, tiles=tiles)
            self._ready.add(quantised)
        return tiles


def record_quantise(
    program: Program, x: np.ndarray, q: QuantisedRows, rows: np.ndarray | None = None, norm: Norm | None = None
) -> None:
    """Name the input of the projections that follow: x (T, K) float32, or its rows ``rows`` (R,) int32 if given.

    The conversion is added with the first projection, in the form that its weights need. ``rows`` is read at run time.
    With ``norm`` the input is the RMSNorm of those rows; all matrices must then be of quantised types.
    """
    q.name_source(x, rows, norm)
