"""Sixteen-lane float32 vectors for compiled kernels: loads, arithmetic, exp. The LLVM building blocks (`ir_…`) serve
the register-tiled inner loops of other modules too.

A value of type ``f32x16`` is one LLVM vector: one AVX-512 register, two of AVX2, four of NEON; the instruction set changes
the speed and not the result, because every operation (fused multiply-add included) is exact to one rounding and sums
have a fixed order. Addresses are int64, in bytes; nothing needs more alignment than its element.

Intrinsics live at module level: one captured in a closure would get a new identity per process, and the kernels' disk
cache would never hit.
"""

import operator
from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

__all__ = [
    "ACCUMULATORS",
    "LANES",
    "V16",
    "as_f32",
    "bits_to_f32",
    "exp2_v",
    "exp_v",
    "fma",
    "hmax",
    "hsum",
    "load",
    "load_f16",
    "load_i32_as_f32",
    "load_twice",
    "select_gt",
    "splat",
    "store",
    "store_f16",
    "sum_squares",
    "swap_pairs",
    "vmax",
]

LANES = 16
I8, I32, I64, F16, F32, F64 = (
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
    ir.DoubleType(),
)
VF, VH, VI, VD = (ir.VectorType(t, LANES) for t in (F32, F16, I32, F64))

# 16-lane sums that fit into registers beside the operands: 32 registers of 512 bits, or half as many bytes and less
ACCUMULATORS = 24 if llvm.get_host_cpu_features().get("avx512f") else 6


class Vec16(types.Type):
    """Numba's view of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


V16 = Vec16()


@register_model(Vec16)
class _Vec16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, VF)


def _arithmetic(function: Callable, instruction: str) -> None:
    @infer_global(function)
    class _Typing(ConcreteTemplate):
        cases = [signature(V16, V16, V16)]  # noqa: RUF012

    @lower_builtin(function, V16, V16)
    def _lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_function, _instruction)


# -- LLVM helpers ----------------------------------------------------------------------------------------------------


def ir_call(b, name, result, *args):
    function = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), args)


def ir_fma(b, x, y, z):
    return ir_call(b, f"llvm.fma.v{LANES}f32", VF, x, y, z)


def ir_at(b, base, *terms):
    """base + Σ terms; a term is a value, a constant, or a (value, constant factor) pair."""
    for term in terms:
        if isinstance(term, tuple):
            term = b.mul(term[0], I64(term[1]))
        elif isinstance(term, int):
            if not term:
                continue
            term = I64(term)
        base = b.add(base, term)
    return base


def ir_load(b, address, kind, align):
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def ir_store(b, value, address, align):
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def ir_prefetch(b, address):
    """Asks for the cache line of an address, which need not be valid, into all levels."""
    pointer = b.inttoptr(address, I8.as_pointer())
    ir_call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))  # for reading, to stay, data


def ir_splat(b, scalar, count=LANES):
    undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
    first = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, count), [0] * count))


def ir_shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def ir_constant(value, kind=VF):
    return ir.Constant(kind, [value] * LANES)


def ir_lanes(b, address, half):
    """Sixteen stored numbers as float32; `half`: they are FP16."""
    return b.fpext(ir_load(b, address, VH, 2), VF) if half else ir_load(b, address, VF, 4)


def _fold(b, x, combine):
    """Tree over the lanes, always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        high = ir_shuffle(b, x, x, range(width, 2 * width))
        low = ir_shuffle(b, x, x, range(width))
        x = combine(low, high)
    return b.extract_element(x, I32(0))


# -- vectors ---------------------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, address):
    """Sixteen float32 at an address."""
    return V16(types.int64), lambda context, b, sig, args: ir_load(b, args[0], VF, 4)


@intrinsic
def load_f16(typingctx, address):
    """Sixteen FP16 at an address, widened; exact."""
    return V16(types.int64), lambda context, b, sig, args: ir_lanes(b, args[0], True)


@intrinsic
def load_i32_as_f32(typingctx, address):
    """Sixteen int32 at an address as float32; exact below 2^24."""
    return V16(types.int64), lambda context, b, sig, args: b.sitofp(ir_load(b, args[0], VI, 4), VF)


@intrinsic
def store(typingctx, address, v):
    """Writes sixteen float32."""

    def codegen(context, b, sig, args):
        ir_store(b, args[1], args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, V16), codegen


@intrinsic
def store_f16(typingctx, address, v):
    """Writes sixteen FP16, rounded to nearest even."""

    def codegen(context, b, sig, args):
        ir_store(b, b.fptrunc(args[1], VH), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, V16), codegen


@intrinsic
def as_f32(typingctx, x):
    """A number as a float32 scalar."""
    return types.float32(x), lambda context, b, sig, args: context.cast(b, args[0], sig.args[0], types.float32)


@intrinsic
def bits_to_f32(typingctx, bits):
    """The float32 with these 32 bits."""
    return types.float32(types.uint32), lambda context, b, sig, args: b.bitcast(args[0], F32)


@intrinsic
def splat(typingctx, x):
    """The same float32 in every lane."""
    return V16(types.float32), lambda context, b, sig, args: ir_splat(b, args[0])


@intrinsic
def fma(typingctx, x, y, z):
    """x·y + z with one rounding."""
    return V16(V16, V16, V16), lambda context, b, sig, args: ir_fma(b, *args)


@intrinsic
def vmax(typingctx, x, y):
    """Lane-wise x > y ? x : y, so y where x is NaN."""
    return V16(V16, V16), lambda context, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def select_gt(typingctx, a, b_, x, y):
    """Lane-wise a > b ? x : y."""
    return V16(V16, V16, V16, V16), lambda context, b, sig, args: b.select(
        b.fcmp_ordered(">", args[0], args[1]), args[2], args[3]
    )


@intrinsic
def hsum(typingctx, v):
    """Sum of the lanes in float32, by a fixed tree."""
    return types.float32(V16), lambda context, b, sig, args: _fold(b, args[0], b.fadd)


@intrinsic
def hmax(typingctx, v):
    """Largest lane; lanes must not be NaN."""
    return types.float32(V16), lambda context, b, sig, args: _fold(
        b, args[0], lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)
    )


@intrinsic
def sum_squares(typingctx, address, count):
    """Σ x² in float64 over `count` float32 (a multiple of 16) at an address."""

    def codegen(context, b, sig, args):
        acc = cgutils.alloca_once(b, VD)
        b.store(ir_constant(0.0, VD), acc)
        with cgutils.for_range(b, b.sdiv(args[1], I64(LANES)), intp=I64) as loop:
            wide = b.fpext(ir_load(b, ir_at(b, args[0], (loop.index, 64)), VF, 4), VD)
            b.store(b.fadd(b.load(acc), b.fmul(wide, wide)), acc)
        return _fold(b, b.load(acc), b.fadd)

    return types.float64(types.int64, types.int64), codegen


@intrinsic
def swap_pairs(typingctx, v):
    """Neighbours exchanged: lanes 1, 0, 3, 2, …"""
    return V16(V16), lambda context, b, sig, args: ir_shuffle(b, args[0], args[0], [i ^ 1 for i in range(LANES)])


@intrinsic
def load_twice(typingctx, address, sign):
    """Eight float32 at an address, each in two neighbouring lanes, the even ones multiplied by `sign`."""

    def codegen(context, b, sig, args):
        eight = ir_load(b, args[0], ir.VectorType(F32, 8), 4)
        both = ir_shuffle(b, eight, eight, [i // 2 for i in range(LANES)])
        one = ir_splat(b, F32(1.0))
        signs = ir_shuffle(b, ir_splat(b, args[1]), one, [LANES if i % 2 else 0 for i in range(LANES)])
        return b.fmul(both, signs)

    return V16(types.int64, types.float32), codegen


# Taylor coefficients of e^r, highest power first: |r| ≤ ln2/2 makes the first term left out 5e-9 relative at most.
_E = tuple(1.0 / f for f in (5040, 720, 120, 24, 6, 2, 1, 1))
_LN2 = 0.6931471805599453
_LN2_HIGH = 0.693145751953125  # 16 bits: n · _LN2_HIGH is exact
_ROUND = 12582912.0  # 1.5 · 2^23: adding it rounds to an integer, held in the low mantissa bits


def _power(b, rounded, r, x, coefficients, low):
    """2^n · Σ c_i r^i where `rounded` = n + _ROUND; 0 where x ≤ low."""
    p = ir_constant(coefficients[0])
    for c in coefficients[1:]:
        p = ir_fma(b, p, r, ir_constant(c))
    exponent = b.shl(b.bitcast(rounded, VI), ir_constant(23, VI))
    scaled = b.bitcast(b.add(b.bitcast(p, VI), exponent), VF)
    return b.select(b.fcmp_ordered(">", x, ir_constant(low)), scaled, ir_constant(0.0))


@intrinsic
def exp_v(typingctx, v):
    """e^x to 2 units in the last place for x ≤ 88; 0 below -87.3 (no subnormal results)."""

    def codegen(context, b, sig, args):
        x = args[0]
        rounded = ir_fma(b, x, ir_constant(1 / _LN2), ir_constant(_ROUND))
        n = b.fsub(rounded, ir_constant(_ROUND))
        r = ir_fma(b, n, ir_constant(-_LN2_HIGH), x)
        r = ir_fma(b, n, ir_constant(_LN2_HIGH - _LN2), r)
        return _power(b, rounded, r, x, _E, -87.3)

    return V16(V16), codegen


@intrinsic
def exp2_v(typingctx, v):
    """2^x to 2 units in the last place for x ≤ 127; 0 below -126 (no subnormal results)."""

    def codegen(context, b, sig, args):
        x = args[0]
        rounded = b.fadd(x, ir_constant(_ROUND))
        r = b.fsub(x, b.fsub(rounded, ir_constant(_ROUND)))
        return _power(b, rounded, r, x, [c * _LN2 ** (len(_E) - 1 - i) for i, c in enumerate(_E)], -126.0)

    return V16(V16), codegen
