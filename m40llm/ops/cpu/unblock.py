"""Decoders of GGUF blocks for packing: one block becomes integers and scales, in the order that formats.py stores.

Each is ``void (raw, q, halves, small)``, all addresses: the block's bytes in; out come the unit's unsigned integers
(uint8, 32 or 256), its FP16 scale and minimum (2 uint16), and for blocks of 256 the int8 sub-scales, each followed by its
sub-minimum where there are any. Block layouts: ggml's ggml-common.h.
"""

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from m40llm.gguf import TensorType
from m40llm.ops.cpu.intrinsics import u8, u16
from m40llm.ops.cpu.program import NativeFunction

__all__ = ["UNBLOCKERS"]

SIGNATURE = types.void(*[types.int64] * 4)
UNBLOCKERS: dict[TensorType, NativeFunction] = {}

inline = numba.njit(_nrt=False, error_model="numpy", boundscheck=False)


def _unblocks(kind: TensorType) -> Callable[[Callable[..., None]], NativeFunction]:
    def register(function: Callable[..., None]) -> NativeFunction:
        UNBLOCKERS[kind] = NativeFunction(f"pack {kind.name.lower()}", SIGNATURE, function)
        return UNBLOCKERS[kind]

    return register


@inline
def _half(raw, at):
    return np.uint16(raw[at]) | np.uint16(np.uint16(raw[at + 1]) << 8)


@intrinsic(prefer_literal=True)
def _add_bits(typingctx, raw, right, mask, left, q, fresh):
    """Sixteen bytes: q = ((raw >> right) & mask) << left, or q |= … where ``fresh`` (a literal) is 0; raw and q
    are addresses.

    As vectors, because compilers must assume that two addresses may overlap, and then go byte by byte.
    """

    def codegen(context, b, sig, args):
        vector = ir.VectorType(ir.IntType(8), 16)

        def at(address):
            return b.inttoptr(address, vector.as_pointer())

        def splat(value):
            first = b.insert_element(
                ir.Constant(vector, ir.Undefined), b.trunc(value, vector.element), ir.IntType(32)(0)
            )
            return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))

        taken = b.load(at(args[0]))
        taken.align = 1
        bits = b.shl(b.and_(b.lshr(taken, splat(args[1])), splat(args[2])), splat(args[3]))
        if not fresh.literal_value:
            old = b.load(at(args[4]))
            old.align = 1
            bits = b.or_(bits, old)
        b.store(bits, at(args[4])).align = 1
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, fresh), codegen


@inline
def _nibbles(raw, q, half):
    """``half`` bytes: low nibbles first, then high ones."""
    for i in range(0, half, 16):
        _add_bits(raw + i, 0, 15, 0, q + i, 1)
        _add_bits(raw + i, 4, 15, 0, q + half + i, 1)


@inline
def _fifth_bits(raw, at, q):
    for i in range(4):
        for bit in range(8):
            q[8 * i + bit] |= ((raw[at + i] >> bit) & 1) << 4


@_unblocks(TensorType.Q4_0)
def _q4_0(raw, q, halves, small):
    _nibbles(raw + 2, q, 16)
    raw, q, halves = u8(raw, 18), u8(q, 32), u16(halves, 2)
    halves[0] = _half(raw, 0)


@_unblocks(TensorType.IQ4_NL)
def _iq4_nl(raw, q, halves, small):
    _nibbles(raw + 2, q, 16)
    raw, q, halves = u8(raw, 18), u8(q, 32), u16(halves, 2)
    halves[0] = _half(raw, 0)


@_unblocks(TensorType.Q4_1)
def _q4_1(raw, q, halves, small):
    _nibbles(raw + 4, q, 16)
    raw, q, halves = u8(raw, 20), u8(q, 32), u16(halves, 2)
    halves[0], halves[1] = _half(raw, 0), _half(raw, 2)


@_unblocks(TensorType.Q5_0)
def _q5_0(raw, q, halves, small):
    _nibbles(raw + 6, q, 16)
    raw, q, halves = u8(raw, 22), u8(q, 32), u16(halves, 2)
    halves[0] = _half(raw, 0)
    _fifth_bits(raw, 2, q)


@_unblocks(TensorType.Q5_1)
def _q5_1(raw, q, halves, small):
    _nibbles(raw + 8, q, 16)
    raw, q, halves = u8(raw, 24), u8(q, 32), u16(halves, 2)
    halves[0], halves[1] = _half(raw, 0), _half(raw, 2)
    _fifth_bits(raw, 4, q)


@_unblocks(TensorType.Q8_0)
def _q8_0(raw, q, halves, small):
    raw, q, halves = u8(raw, 34), u8(q, 32), u16(halves, 2)
    halves[0] = _half(raw, 0)
    for i in range(32):
        q[i] = raw[2 + i] ^ 128  # signed to unsigned with bias 128


@_unblocks(TensorType.Q2_K)
def _q2_k(raw, q, halves, small):
    for part in range(2):
        for field in range(4):
            for i in range(0, 32, 16):
                _add_bits(raw + 16 + 32 * part + i, 2 * field, 3, 0, q + 128 * part + 32 * field + i, 1)
    raw, halves, small = u8(raw, 84), u16(halves, 2), u8(small, 32)
    halves[0], halves[1] = _half(raw, 80), _half(raw, 82) ^ 0x8000
    for i in range(16):
        small[2 * i], small[2 * i + 1] = raw[i] & 15, raw[i] >> 4


@_unblocks(TensorType.Q3_K)
def _q3_k(raw, q, halves, small):
    for part in range(2):
        for field in range(4):
            for i in range(0, 32, 16):
                to = q + 128 * part + 32 * field + i
                _add_bits(raw + 32 + 32 * part + i, 2 * field, 3, 0, to, 1)
                _add_bits(raw + i, 4 * part + field, 1, 2, to, 0)
    raw, halves, small = u8(raw, 110), u16(halves, 2), u8(small, 16)
    halves[0] = _half(raw, 108)
    for i in range(16):
        low = (raw[96 + i % 8] >> (4 * (i // 8))) & 15
        high = (raw[104 + i % 4] >> (2 * (i // 4))) & 3
        small[i] = (low | (high << 4)) - 32


@inline
def _k_scales(raw, halves, small):
    """The 12 bytes of 6-bit scales and minimums of Q4_K and Q5_K."""
    halves[0], halves[1] = _half(raw, 0), _half(raw, 2) ^ 0x8000
    for i in range(4):
        a, b, c = raw[4 + i], raw[8 + i], raw[12 + i]
        small[2 * i], small[2 * i + 1] = a & 63, b & 63
        small[8 + 2 * i], small[9 + 2 * i] = (c & 15) | ((a >> 6) << 4), (c >> 4) | ((b >> 6) << 4)


@_unblocks(TensorType.Q4_K)
def _q4_k(raw, q, halves, small):
    for part in range(4):
        _nibbles(raw + 16 + 32 * part, q + 64 * part, 32)
    _k_scales(u8(raw, 144), u16(halves, 2), u8(small, 16))


@_unblocks(TensorType.Q5_K)
def _q5_k(raw, q, halves, small):
    for part in range(4):
        _nibbles(raw + 48 + 32 * part, q + 64 * part, 32)
    for block in range(8):
        for i in range(0, 32, 16):
            _add_bits(raw + 16 + i, block, 1, 4, q + 32 * block + i, 0)
    _k_scales(u8(raw, 176), u16(halves, 2), u8(small, 16))


@_unblocks(TensorType.Q6_K)
def _q6_k(raw, q, halves, small):
    for part in range(2):
        _nibbles(raw + 64 * part, q + 128 * part, 64)
        for field in range(4):
            for i in range(0, 32, 16):
                _add_bits(raw + 128 + 32 * part + i, 2 * field, 3, 4, q + 128 * part + 32 * field + i, 0)
    _add_bits(raw + 192, 0, 255, 0, small, 1)
    raw, halves = u8(raw, 210), u16(halves, 2)
    halves[0] = _half(raw, 208)


@_unblocks(TensorType.IQ4_XS)
def _iq4_xs(raw, q, halves, small):
    for i in range(8):
        _nibbles(raw + 8 + 16 * i, q + 32 * i, 16)
    raw, halves, small = u8(raw, 136), u16(halves, 2), u8(small, 8)
    halves[0] = _half(raw, 0)
    for i in range(8):
        low = (raw[4 + i // 2] >> (4 * (i % 2))) & 15
        high = (raw[2 + i // 4] >> (2 * (i % 4))) & 3
        small[i] = (low | (high << 4)) - 32
