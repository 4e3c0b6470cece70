"""Sixteen-lane float32 vectors for compiled kernels: loads, arithmetic, exp, and register-tiled inner loops.

A value of type ``f32x16`` is one LLVM vector: one AVX-512 register, two of AVX2, four of NEON; the instruction set changes
the speed and not the result, because every operation (fused multiply-add included) is exact to one rounding and sums
have a fixed order. Addresses are int64, in bytes; nothing needs more alignment than its element.

Intrinsics live at module level: one captured in a closure would get a new identity per process, and the kernels' disk
cache would never hit.
"""

import operator

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import infer_global

__all__ = [
    "ACCUMULATORS",
    "LANES",
    "V16",
    "as_f32",
    "dot_keys",
    "exp2_v",
    "exp_v",
    "fma",
    "gemm_tile",
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
    "transpose",
    "vmax",
    "weigh_values",
]

LANES = 16
I8, I32, I64, F16, F32, F64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType(), ir.DoubleType()
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


def _arithmetic(function, instruction: str) -> None:
    @infer_global(function)
    class _Typing(ConcreteTemplate):
        cases = [signature(V16, V16, V16)]  # noqa: RUF012

    @lower_builtin(function, V16, V16)
    def _lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


for _function, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    _arithmetic(_function, _instruction)


# -- LLVM helpers ----------------------------------------------------------------------------------------------------


def _call(b, name, result, *args):
    function = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), args)


def _fma(b, x, y, z):
    return _call(b, f"llvm.fma.v{LANES}f32", VF, x, y, z)


def _at(b, base, *terms):
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


def _load(b, address, kind, align):
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(b, value, address, align):
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def _splat(b, scalar, count=LANES):
    undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
    first = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _constant(value, kind=VF):
    return ir.Constant(kind, [value] * LANES)


def _zeros(b, count):
    """`count` stack vectors of zeros; LLVM keeps them in registers."""
    slots = [cgutils.alloca_once(b, VF) for _ in range(count)]
    for slot in slots:
        b.store(_constant(0.0), slot)
    return slots


def _lanes16(b, address, half):
    """Sixteen stored numbers as float32; `half`: they are FP16."""
    return b.fpext(_load(b, address, VH, 2), VF) if half else _load(b, address, VF, 4)


def _fold(b, x, combine):
    """Tree over the lanes, always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        high = _shuffle(b, x, x, range(width, 2 * width))
        low = _shuffle(b, x, x, range(width))
        x = combine(low, high)
    return b.extract_element(x, I32(0))


def _literal(*values):
    if all(isinstance(v, types.IntegerLiteral) for v in values):
        return tuple(v.literal_value for v in values)
    return None


# -- vectors ---------------------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, address):
    """Sixteen float32 at an address."""
    return V16(types.int64), lambda context, b, sig, args: _load(b, args[0], VF, 4)


@intrinsic
def load_f16(typingctx, address):
    """Sixteen FP16 at an address, widened; exact."""
    return V16(types.int64), lambda context, b, sig, args: _lanes16(b, args[0], True)


@intrinsic
def load_i32_as_f32(typingctx, address):
    """Sixteen int32 at an address as float32; exact below 2^24."""
    return V16(types.int64), lambda context, b, sig, args: b.sitofp(_load(b, args[0], VI, 4), VF)


@intrinsic
def store(typingctx, address, v):
    """Writes sixteen float32."""

    def codegen(context, b, sig, args):
        _store(b, args[1], args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, V16), codegen


@intrinsic
def store_f16(typingctx, address, v):
    """Writes sixteen FP16, rounded to nearest even."""

    def codegen(context, b, sig, args):
        _store(b, b.fptrunc(args[1], VH), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, V16), codegen


@intrinsic
def as_f32(typingctx, x):
    """A number as a float32 scalar."""
    return types.float32(x), lambda context, b, sig, args: context.cast(b, args[0], sig.args[0], types.float32)


@intrinsic
def splat(typingctx, x):
    """The same float32 in every lane."""
    return V16(types.float32), lambda context, b, sig, args: _splat(b, args[0])


@intrinsic
def fma(typingctx, x, y, z):
    """x·y + z with one rounding."""
    return V16(V16, V16, V16), lambda context, b, sig, args: _fma(b, *args)


@intrinsic
def vmax(typingctx, x, y):
    """Lane-wise x > y ? x : y, so y where x is NaN."""
    return V16(V16, V16), lambda context, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def select_gt(typingctx, a, b_, x, y):
    """Lane-wise a > b ? x : y."""
    return V16(V16, V16, V16, V16), lambda context, b, sig, args: b.select(b.fcmp_ordered(">", args[0], args[1]), args[2], args[3])


@intrinsic
def hsum(typingctx, v):
    """Sum of the lanes in float32, by a fixed tree."""
    return types.float32(V16), lambda context, b, sig, args: _fold(b, args[0], b.fadd)


@intrinsic
def hmax(typingctx, v):
    """Largest lane; lanes must not be NaN."""
    return types.float32(V16), lambda context, b, sig, args: _fold(b, args[0], lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@intrinsic
def sum_squares(typingctx, address, count):
    """Σ x² in float64 over `count` float32 (a multiple of 16) at an address."""

    def codegen(context, b, sig, args):
        acc = cgutils.alloca_once(b, VD)
        b.store(_constant(0.0, VD), acc)
        with cgutils.for_range(b, b.sdiv(args[1], I64(LANES)), intp=I64) as loop:
            wide = b.fpext(_load(b, _at(b, args[0], (loop.index, 64)), VF, 4), VD)
            b.store(b.fadd(b.load(acc), b.fmul(wide, wide)), acc)
        return _fold(b, b.load(acc), b.fadd)

    return types.float64(types.int64, types.int64), codegen


@intrinsic
def swap_pairs(typingctx, v):
    """Neighbours exchanged: lanes 1, 0, 3, 2, …"""
    return V16(V16), lambda context, b, sig, args: _shuffle(b, args[0], args[0], [i ^ 1 for i in range(LANES)])


@intrinsic
def load_twice(typingctx, address, sign):
    """Eight float32 at an address, each in two neighbouring lanes, the even ones multiplied by `sign`."""

    def codegen(context, b, sig, args):
        eight = _load(b, args[0], ir.VectorType(F32, 8), 4)
        both = _shuffle(b, eight, eight, [i // 2 for i in range(LANES)])
        one = _splat(b, F32(1.0))
        signs = _shuffle(b, _splat(b, args[1]), one, [LANES if i % 2 else 0 for i in range(LANES)])
        return b.fmul(both, signs)

    return V16(types.int64, types.float32), codegen


# Taylor coefficients of e^r, highest power first: |r| ≤ ln2/2 makes the first term left out 5e-9 relative at most.
_E = tuple(1.0 / f for f in (5040, 720, 120, 24, 6, 2, 1, 1))
_LN2 = 0.6931471805599453
_LN2_HIGH = 0.693145751953125  # 16 bits: n · _LN2_HIGH is exact
_ROUND = 12582912.0  # 1.5 · 2^23: adding it rounds to an integer, held in the low mantissa bits


def _power(b, rounded, r, x, coefficients, low):
    """2^n · Σ c_i r^i where `rounded` = n + _ROUND; 0 where x ≤ low."""
    p = _constant(coefficients[0])
    for c in coefficients[1:]:
        p = _fma(b, p, r, _constant(c))
    exponent = b.shl(b.bitcast(rounded, VI), _constant(23, VI))
    scaled = b.bitcast(b.add(b.bitcast(p, VI), exponent), VF)
    return b.select(b.fcmp_ordered(">", x, _constant(low)), scaled, _constant(0.0))


@intrinsic
def exp_v(typingctx, v):
    """e^x to 2 units in the last place for x ≤ 88; 0 below -87.3 (no subnormal results)."""

    def codegen(context, b, sig, args):
        x = args[0]
        rounded = _fma(b, x, _constant(1 / _LN2), _constant(_ROUND))
        n = b.fsub(rounded, _constant(_ROUND))
        r = _fma(b, n, _constant(-_LN2_HIGH), x)
        r = _fma(b, n, _constant(_LN2_HIGH - _LN2), r)
        return _power(b, rounded, r, x, _E, -87.3)

    return V16(V16), codegen


@intrinsic
def exp2_v(typingctx, v):
    """2^x to 2 units in the last place for x ≤ 127; 0 below -126 (no subnormal results)."""

    def codegen(context, b, sig, args):
        x = args[0]
        rounded = b.fadd(x, _constant(_ROUND))
        r = b.fsub(x, b.fsub(rounded, _constant(_ROUND)))
        return _power(b, rounded, r, x, [c * _LN2 ** (len(_E) - 1 - i) for i, c in enumerate(_E)], -126.0)

    return V16(V16), codegen


# -- inner loops -----------------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def gemm_tile(typingctx, rows, vectors, scaled, a, a_row, a_k, b_, b_k, c, c_row, k, factors):
    """C[r, :] = Σ_k A[r, k] · B[k, :] (+ factors · C[r, :]), for `rows` rows and 16·`vectors` columns, in registers.

    Literals: rows, vectors, scaled (0: C is only written; 1: C is scaled per column by 16·`vectors` float32 at `factors`
    first). a, b_, c, factors are addresses of float32; A has strides a_row, a_k, B has contiguous rows of stride b_k.
    """
    sizes = _literal(rows, vectors, scaled)
    if sizes is None:
        return None
    m, n, accumulate = sizes

    def codegen(context, b, sig, args):
        a, a_row, a_k, b_, b_k, c, c_row, k, factors = args[3:]
        acc = _zeros(b, m * n)
        if accumulate:
            scales = [_load(b, _at(b, factors, 64 * j), VF, 4) for j in range(n)]
            for i in range(m):
                for j in range(n):
                    old = _load(b, _at(b, c, (c_row, i), 64 * j), VF, 4)
                    b.store(b.fmul(old, scales[j]), acc[i * n + j])
        with cgutils.for_range(b, k, intp=I64) as loop:
            at_b = _at(b, b_, b.mul(b_k, loop.index))
            at_a = _at(b, a, b.mul(a_k, loop.index))
            columns = [_load(b, _at(b, at_b, 64 * j), VF, 4) for j in range(n)]
            for i in range(m):
                x = _splat(b, _load(b, _at(b, at_a, (a_row, i)), F32, 4))
                for j in range(n):
                    slot = acc[i * n + j]
                    b.store(_fma(b, x, columns[j], b.load(slot)), slot)
        for i in range(m):
            for j in range(n):
                _store(b, b.load(acc[i * n + j]), _at(b, c, (c_row, i), 64 * j), 4)
        return context.get_dummy_value()

    return types.void(rows, vectors, scaled, *[types.int64] * 9), codegen


def _sums(b, vectors):
    """Lane sums of 2^j vectors as the first 2^j elements of a list of scalars' vector, by a fixed tree."""
    width = LANES  # lanes that still belong to one sum
    while len(vectors) > 1:
        half = width // 2
        starts = range(0, 2 * LANES, width)
        low = [s + i for s in starts for i in range(half)]
        high = [s + half + i for s in starts for i in range(half)]
        vectors = [
            b.fadd(_shuffle(b, x, y, low), _shuffle(b, x, y, high)) for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    v, count = vectors[0], LANES
    while width > 1:
        half = width // 2
        starts = range(0, count, width)
        low = [s + i for s in starts for i in range(half)]
        high = [s + half + i for s in starts for i in range(half)]
        v = b.fadd(_shuffle(b, v, v, low), _shuffle(b, v, v, high))
        width, count = half, count // 2
    return v


@intrinsic(prefer_literal=True)
def dot_keys(typingctx, heads, keys, size, half, q, k, k_row, valid, out, out_row):
    """out[h, j] = q[h] · k[j] for `heads` query vectors and `keys` (a power of two) cached ones, in registers.

    Literals: heads, keys, size (of a head, a multiple of 16), half (1: K is FP16, 0: float32). q has contiguous float32
    rows of `size`; K has row stride k_row bytes, and rows from `valid` on are not read (the last valid one is instead);
    out has row stride out_row bytes.
    """
    sizes = _literal(heads, keys, size, half)
    if sizes is None:
        return None
    m, n, head, is_half = sizes

    def codegen(context, b, sig, args):
        q, k, k_row, valid, out, out_row = args[4:]
        last = b.sub(valid, I64(1))
        starts = []
        for j in range(n):
            row = b.select(b.icmp_signed("<", I64(j), last), I64(j), last)
            starts.append(_at(b, k, b.mul(k_row, row)))
        acc = _zeros(b, m * n)
        with cgutils.for_range(b, I64(head // LANES), intp=I64) as loop:
            at_q = _at(b, q, (loop.index, 64))
            at_k = b.mul(loop.index, I64(32 if is_half else 64))
            queries = [_load(b, _at(b, at_q, 4 * head * i), VF, 4) for i in range(m)]
            for j in range(n):
                key = _lanes16(b, _at(b, starts[j], at_k), is_half)
                for i in range(m):
                    slot = acc[i * n + j]
                    b.store(_fma(b, queries[i], key, b.load(slot)), slot)
        for i in range(m):
            sums = _sums(b, [b.load(slot) for slot in acc[i * n : (i + 1) * n]])
            _store(b, sums, _at(b, out, (out_row, i)), 4)
        return context.get_dummy_value()

    return types.void(heads, keys, size, half, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def weigh_values(typingctx, heads, vectors, half, p, p_row, v, v_row, count, out, out_row):
    """out[h, :] = Σ_j p[h, j] · v[j, :] over `count` cached rows, for `heads` heads and 16·`vectors` columns, in registers.

    Literals: heads, vectors, half (1: V is FP16, 0: float32). p and out are float32; strides in bytes.
    """
    sizes = _literal(heads, vectors, half)
    if sizes is None:
        return None
    m, n, is_half = sizes

    def codegen(context, b, sig, args):
        p, p_row, v, v_row, count, out, out_row = args[3:]
        acc = _zeros(b, m * n)
        with cgutils.for_range(b, count, intp=I64) as loop:
            at_v = _at(b, v, b.mul(v_row, loop.index))
            at_p = _at(b, p, (loop.index, 4))
            values = [_lanes16(b, _at(b, at_v, (32 if is_half else 64) * j), is_half) for j in range(n)]
            for i in range(m):
                weight = _splat(b, _load(b, _at(b, at_p, (p_row, i)), F32, 4))
                for j in range(n):
                    slot = acc[i * n + j]
                    b.store(_fma(b, weight, values[j], b.load(slot)), slot)
        for i in range(m):
            for j in range(n):
                _store(b, b.load(acc[i * n + j]), _at(b, out, (out_row, i), 64 * j), 4)
        return context.get_dummy_value()

    return types.void(heads, vectors, half, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def transpose(typingctx, gather, rows, offset, tile, tile_row):
    """Sixteen row vectors, whose int64 addresses lie at `rows`, plus `offset` bytes, against a 16×16 tile of stride tile_row.

    Literal gather: 1 reads the row vectors and writes them as the tile's columns; 0 reads the tile and writes its columns to
    the row vectors. Float32 on both sides.
    """
    sizes = _literal(gather)
    if sizes is None:
        return None

    def codegen(context, b, sig, args):
        rows, offset, tile, tile_row = args[1:]
        outside = [_at(b, _load(b, _at(b, rows, 8 * i), I64, 8), offset) for i in range(LANES)]
        inside = [_at(b, tile, (tile_row, i)) for i in range(LANES)]
        source, target = (outside, inside) if sizes[0] else (inside, outside)
        v = [_load(b, address, VF, 4) for address in source]
        # exchange off-diagonal blocks of 8, 4, 2 and 1 elements
        width = LANES // 2
        while width:
            low = [i if not i & width else LANES + (i ^ width) for i in range(LANES)]
            high = [(i ^ width) if not i & width else LANES + i for i in range(LANES)]
            for i in range(LANES):
                if not i & width:
                    x, y = v[i], v[i | width]
                    v[i], v[i | width] = _shuffle(b, x, y, low), _shuffle(b, x, y, high)
            width //= 2
        for value, address in zip(v, target, strict=True):
            _store(b, value, address, 4)
        return context.get_dummy_value()

    return types.void(gather, *[types.int64] * 4), codegen
