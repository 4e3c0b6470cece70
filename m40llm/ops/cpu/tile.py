"""Tile kernels: 16 packed rows times 1, 2, 4 or 8 tokens, one per weight type, token count and instruction set.

A tile kernel is ``void (quants, scales, x, y, steps)``, all int64 (addresses, and K/32 or K): it overwrites y, float32
(tokens, 16). Order of operations per row and token, the same everywhere, so results are equal bit for bit:
for each block (or 16 weights, where these have a scale): acc = fma(float(sum q*v) * sx, scale, acc), and then
acc = fma(min, sx * sum v, acc) where minimums are stored.

Activations of a tile: per block of 32, eight quads x tokens x 8 bytes (see isa.py), then META rows of ``tokens`` words:
sx, and minus the integer sums of v over the first 16, last 16 and all 32 (int32), and the same sums times sx (float32).
For float types: x is float32, (K, tokens).
"""

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from m40llm.gguf import TensorType
from m40llm.gguf.dequant import IQ4_VALUES
from m40llm.ops.cpu.formats import BLOCK, FLOATS, FORMATS, ROWS, Format
from m40llm.ops.cpu.isa import ISA, Dot
from m40llm.ops.cpu.program import NativeFunction
from m40llm.ops.cpu.simd import ir_prefetch

__all__ = ["META", "TILE_TOKENS", "block_bytes", "tile_kernel"]

TILE_TOKENS = (1, 2, 4, 8)
META = 8  # words per token and block: sx; -sum v: first 16, last 16, all; sx * sum v: first 16, last 16, all; unused
AHEAD = 4096  # bytes; of 512 to 16384 none was better, with one to eight tokens
SCALE, NEGATIVE_SUM, SCALED_SUM = 0, 1, 4
WHOLE = 2  # offset of the sum over all 32 behind the one over the first 16

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()


def block_bytes(tokens: int) -> int:
    """Bytes of the activations of a tile per block of 32."""
    return tokens * (2 * BLOCK + 4 * META)


class _Tile:
    """Emits the body for one (type, tokens, instruction set); ``lanes`` rows at a time."""

    def __init__(self, b: ir.IRBuilder, isa: ISA, tokens: int, lanes: int) -> None:
        self.b, self.tokens, self.lanes = b, tokens, lanes
        self.dot = Dot(b, isa, lanes)
        self.floats = ir.VectorType(F32, lanes)
        self.acc = [cgutils.alloca_once(b, self.floats) for _ in range(tokens)]

    def at(self, base: ir.Value, index: ir.Value, stride: int, offset: int = 0) -> ir.Value:
        scaled = self.b.mul(index, ir.Constant(I64, stride))
        return self.plus(self.b.add(base, scaled), offset)

    def plus(self, base: ir.Value, offset: int) -> ir.Value:
        return self.b.add(base, ir.Constant(I64, offset))

    def load(self, address: ir.Value, element: ir.Type, align: int) -> ir.Value:
        loaded = self.b.load(self.b.inttoptr(address, ir.VectorType(element, self.lanes).as_pointer()))
        loaded.align = align
        return loaded

    def halves(self, address: ir.Value) -> ir.Value:
        return self.b.fpext(self.load(address, F16, 16), self.floats)

    def bytes_as_floats(self, address: ir.Value) -> ir.Value:
        return self.b.sitofp(self.b.sext(self.load(address, I8, 8), self.dot.ints), self.floats)

    def prefetch(self, address: ir.Value, size: int) -> None:
        """Ask for the cache lines of ``size`` bytes some time before they are read.

        Hardware stops at page borders; on a Sapphire Rapids Xeon it alone gets two thirds of the memory's speed.
        """
        for offset in range(0, size, 64):
            ir_prefetch(self.b, self.plus(address, offset + AHEAD))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.dot.call(f"llvm.fma.v{self.lanes}f32", self.floats, x, y, z)

    def clear(self) -> None:
        for acc in self.acc:
            self.b.store(ir.Constant(self.floats, [0.0] * self.lanes), acc)

    def store(self, y: ir.Value) -> None:
        for t, acc in enumerate(self.acc):
            pointer = self.b.inttoptr(self.plus(y, 4 * ROWS * t), self.floats.as_pointer())
            self.b.store(self.b.load(acc), pointer).align = 32

    def quads(self, quants: ir.Value, form: Format) -> list[ir.Value]:
        """The eight vectors of weight bytes of the block at an address."""
        found: list[ir.Value] = [None] * 8
        below, offset = 0, 0
        for bits in form.planes:
            fields = 8 // bits
            for e in range(bits):
                word = self.load(self.plus(quants, offset), I32, 4 * self.lanes)
                offset += 4 * ROWS
                for f in range(fields):
                    part, shift = word, bits * f - below
                    if shift > 0:
                        part = self.b.lshr(word, self.dot.constant(shift))
                    elif shift < 0:
                        part = self.b.shl(word, self.dot.constant(-shift))
                    if bits < 8:
                        part = self.b.and_(part, self.dot.constant(((1 << bits) - 1 << below) * 0x01010101))
                    quad = e * fields + f
                    found[quad] = part if found[quad] is None else self.b.or_(found[quad], part)
            below += bits
        if form.table:
            entries = [int(v) + 128 for v in IQ4_VALUES]
            found = [self.dot.lookup(q, entries) for q in found]
        return found

    def add_block(
        self, form: Format, quants: ir.Value, x: ir.Value, scales: list[tuple[ir.Value, ir.Value | None]]
    ) -> None:
        """acc += one block; ``scales`` has a (scale, minimum) per sub-block."""
        b, tokens = self.b, self.tokens
        meta = self.plus(x, 2 * BLOCK * tokens)
        self.prefetch(quants, form.block_bytes)
        quads = self.quads(quants, form)
        per = 8 // len(scales)
        for i, (scale, minimum) in enumerate(scales):
            which = WHOLE if len(scales) == 1 else i
            sums = []
            for t in range(tokens):
                initial = None
                if form.bias_bits is not None:
                    negative = self.dot.load_splat(self.plus(meta, 4 * ((NEGATIVE_SUM + which) * tokens + t)), I32)
                    initial = b.shl(negative, self.dot.constant(form.bias_bits))
                sums.append(self.dot.start(initial))
            for quad in range(per * i, per * (i + 1)):
                prepared = self.dot.prepare(quads[quad])
                for t in range(tokens):
                    sums[t] = self.dot.add(sums[t], prepared, self.plus(x, 8 * (quad * tokens + t)))
            for t in range(tokens):
                sx = self.dot.load_splat(self.plus(meta, 4 * (SCALE * tokens + t)), F32)
                value = b.fmul(b.sitofp(self.dot.total(sums[t]), self.floats), sx)
                acc = self.fma(value, scale, b.load(self.acc[t]))
                if minimum is not None:
                    scaled = self.dot.load_splat(self.plus(meta, 4 * ((SCALED_SUM + which) * tokens + t)), F32)
                    acc = self.fma(minimum, scaled, acc)
                b.store(acc, self.acc[t])

    def quantised(
        self, form: Format, quants: ir.Value, scales: ir.Value, x: ir.Value, steps: ir.Value, row: ir.Value
    ) -> None:
        """acc = all blocks. ``row``: first of this pass's rows within the group."""
        b = self.b
        quants = self.at(quants, row, 4)
        halves, small = self.at(scales, row, 2), self.at(scales, row, 1)
        xb = block_bytes(self.tokens)
        if form.unit == BLOCK:
            with cgutils.for_range(b, steps, intp=I64) as loop:
                scale = self.halves(self.at(halves, loop.index, form.unit_bytes))
                minimum = self.halves(self.at(halves, loop.index, form.unit_bytes, 2 * ROWS)) if form.has_min else None
                at = self.at(quants, loop.index, form.block_bytes)
                self.add_block(form, at, self.at(x, loop.index, xb), [(scale, minimum)])
            return
        blocks, subs, fields = form.unit // BLOCK, BLOCK // form.sub, 2 if form.has_min else 1
        with cgutils.for_range(b, b.lshr(steps, ir.Constant(I64, 3)), intp=I64) as units:
            d = self.halves(self.at(halves, units.index, form.unit_bytes))
            dmin = self.halves(self.at(halves, units.index, form.unit_bytes, 2 * ROWS)) if form.has_min else None
            unit = self.at(small, units.index, form.unit_bytes, 2 * ROWS * fields)
            with cgutils.for_range(b, ir.Constant(I64, blocks), intp=I64) as loop:
                i = b.add(b.mul(units.index, ir.Constant(I64, blocks)), loop.index)
                pairs = []
                for sub in range(subs):
                    record = self.at(unit, loop.index, ROWS * fields * subs, ROWS * fields * sub)
                    scale = b.fmul(d, self.bytes_as_floats(record))
                    minimum = b.fmul(dmin, self.bytes_as_floats(self.plus(record, ROWS))) if form.has_min else None
                    pairs.append((scale, minimum))
                self.add_block(form, self.at(quants, i, form.block_bytes), self.at(x, i, xb), pairs)

    def floating(self, kind: TensorType, weights: ir.Value, x: ir.Value, steps: ir.Value, row: ir.Value) -> None:
        """acc = sum over k of weights of a float type times x."""
        b, size = self.b, FLOATS[kind]
        weights = self.at(weights, row, size)
        with cgutils.for_range(b, steps, intp=I64) as loop:
            at = self.at(weights, loop.index, ROWS * size)
            if kind is TensorType.F32:
                w = self.load(at, F32, 16)
            elif kind is TensorType.F16:
                w = self.halves(at)
            else:
                bits = b.zext(self.load(at, ir.IntType(16), 16), self.dot.ints)
                w = b.bitcast(b.shl(bits, self.dot.constant(16)), self.floats)
            for t in range(self.tokens):
                xt = self.dot.load_splat(self.at(x, loop.index, 4 * self.tokens, 4 * t), F32)
                b.store(self.fma(w, xt, b.load(self.acc[t])), self.acc[t])


@intrinsic(prefer_literal=True)
def _emit_tile(typingctx, isa, kind, tokens, quants, scales, x, y, steps):
    """The body of a tile kernel; the first three arguments are literals."""
    which, form = TensorType(kind.literal_value), FORMATS.get(TensorType(kind.literal_value))
    target, count = ISA(isa.literal_value), tokens.literal_value
    # 16 registers of 8 lanes hold the sums of eight tokens for eight rows at a time, not for sixteen
    lanes = 16 if target.registers_512 else 8

    def codegen(context, builder, signature, args):
        quants, scales, x, y, steps = args[3:]
        tile = _Tile(builder, target, count, lanes)
        with cgutils.for_range(builder, ir.Constant(I64, ROWS // lanes), intp=I64) as passes:
            row = builder.mul(passes.index, ir.Constant(I64, lanes))
            tile.clear()
            if form:
                tile.quantised(form, quants, scales, x, steps, row)
            else:
                tile.floating(which, quants, x, steps, row)
            tile.store(tile.at(y, row, 4))
        return context.get_dummy_value()

    return types.void(isa, kind, tokens, *[types.int64] * 5), codegen


TILE_SIGNATURE = types.void(*[types.int64] * 5)


@functools.cache
def tile_kernel(isa: ISA, kind: TensorType, tokens: int) -> NativeFunction:
    """The tile kernel of a weight type for 1, 2, 4 or 8 tokens; compiles on first use."""
    isa_id, kind_id, token_count = int(isa), int(kind), tokens

    def tile(quants, scales, x, y, steps):
        _emit_tile(isa_id, kind_id, token_count, quants, scales, x, y, steps)

    return NativeFunction(f"{kind.name.lower()} x {tokens} {isa.name.lower()}", TILE_SIGNATURE, tile)
