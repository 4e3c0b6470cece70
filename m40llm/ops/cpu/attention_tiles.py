"""Register-tiled inner loops of attention: products of small matrices, dot products with cached keys, weighted cached values.

Each is one intrinsic whose literal sizes fix how many vector sums it keeps in registers (see `ACCUMULATORS`).
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from m40llm.ops.cpu.simd import (
    F32,
    I64,
    LANES,
    VF,
    ir_at,
    ir_constant,
    ir_fma,
    ir_lanes,
    ir_load,
    ir_prefetch,
    ir_shuffle,
    ir_splat,
    ir_store,
)

__all__ = ["dot_keys", "gemm_tile", "transpose", "weigh_values"]


def _zeros(b, count):
    """`count` stack vectors of zeros; LLVM keeps them in registers."""
    slots = [cgutils.alloca_once(b, VF) for _ in range(count)]
    for slot in slots:
        b.store(ir_constant(0.0), slot)
    return slots


def _literals(*values):
    if all(isinstance(v, types.IntegerLiteral) for v in values):
        return tuple(v.literal_value for v in values)
    return None


@intrinsic(prefer_literal=True)
def gemm_tile(typingctx, rows, vectors, scaled, a, a_row, a_k, b_, b_k, c, c_row, k, factors):
    """C[r, :] = Σ_k A[r, k] · B[k, :] (+ factors · C[r, :]), for `rows` rows and 16·`vectors` columns, in registers.

    Literals: rows, vectors, scaled (0: C is only written; 1: C is scaled per column by 16·`vectors` float32 at `factors`
    first). a, b_, c, factors are addresses of float32; A has strides a_row, a_k, B has contiguous rows of stride b_k.
    """
    sizes = _literals(rows, vectors, scaled)
    if sizes is None:
        return None
    m, n, accumulate = sizes

    def codegen(context, b, sig, args):
        a, a_row, a_k, b_, b_k, c, c_row, k, factors = args[3:]
        acc = _zeros(b, m * n)
        if accumulate:
            scales = [ir_load(b, ir_at(b, factors, 64 * j), VF, 4) for j in range(n)]
            for i in range(m):
                for j in range(n):
                    old = ir_load(b, ir_at(b, c, (c_row, i), 64 * j), VF, 4)
                    b.store(b.fmul(old, scales[j]), acc[i * n + j])
        with cgutils.for_range(b, k, intp=I64) as loop:
            at_b = ir_at(b, b_, b.mul(b_k, loop.index))
            at_a = ir_at(b, a, b.mul(a_k, loop.index))
            columns = [ir_load(b, ir_at(b, at_b, 64 * j), VF, 4) for j in range(n)]
            for i in range(m):
                x = ir_splat(b, ir_load(b, ir_at(b, at_a, (a_row, i)), F32, 4))
                for j in range(n):
                    slot = acc[i * n + j]
                    b.store(ir_fma(b, x, columns[j], b.load(slot)), slot)
        for i in range(m):
            for j in range(n):
                ir_store(b, b.load(acc[i * n + j]), ir_at(b, c, (c_row, i), 64 * j), 4)
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
            b.fadd(ir_shuffle(b, x, y, low), ir_shuffle(b, x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    v, count = vectors[0], LANES
    while width > 1:
        half = width // 2
        starts = range(0, count, width)
        low = [s + i for s in starts for i in range(half)]
        high = [s + half + i for s in starts for i in range(half)]
        v = b.fadd(ir_shuffle(b, v, v, low), ir_shuffle(b, v, v, high))
        width, count = half, count // 2
    return v


@intrinsic(prefer_literal=True)
def dot_keys(typingctx, heads, keys, size, half, q, k, k_row, valid, ahead, out, out_row):
    """out[h, j] = q[h] · k[j] for `heads` query vectors and `keys` (a power of two) cached ones, in registers.

    Literals: heads, keys, size (of a head, a multiple of 16), half (1: K is FP16, 0: float32). q has contiguous float32
    rows of `size`; K has row stride k_row bytes, and rows from `valid` on are not read (the last valid one is instead).
    What lies `ahead` bytes behind the keys is asked for meanwhile. out has row stride out_row bytes.
    """
    sizes = _literals(heads, keys, size, half)
    if sizes is None:
        return None
    m, n, head, is_half = sizes

    def codegen(context, b, sig, args):
        q, k, k_row, valid, ahead, out, out_row = args[4:]
        last = b.sub(valid, I64(1))
        starts = []
        for j in range(n):
            row = b.select(b.icmp_signed("<", I64(j), last), I64(j), last)
            starts.append(ir_at(b, k, b.mul(k_row, row)))
        acc = _zeros(b, m * n)
        with cgutils.for_range(b, I64(head // LANES), intp=I64) as loop:
            at_q = ir_at(b, q, (loop.index, 64))
            at_k = b.mul(loop.index, I64(32 if is_half else 64))
            queries = [ir_load(b, ir_at(b, at_q, 4 * head * i), VF, 4) for i in range(m)]
            for j in range(n):
                ir_prefetch(b, ir_at(b, starts[j], at_k, ahead))
                key = ir_lanes(b, ir_at(b, starts[j], at_k), is_half)
                for i in range(m):
                    slot = acc[i * n + j]
                    b.store(ir_fma(b, queries[i], key, b.load(slot)), slot)
        for i in range(m):
            sums = _sums(b, [b.load(slot) for slot in acc[i * n : (i + 1) * n]])
            ir_store(b, sums, ir_at(b, out, (out_row, i)), 4)
        return context.get_dummy_value()

    return types.void(heads, keys, size, half, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def weigh_values(typingctx, heads, vectors, half, p, p_row, v, v_row, count, ahead, out, out_row):
    """out[h, :] = Σ_j p[h, j] · v[j, :] over `count` cached rows, for `heads` heads and 16·`vectors` columns, in registers.

    Literals: heads, vectors, half (1: V is FP16, 0: float32). p and out are float32; strides in bytes.
    What lies `ahead` bytes behind the values is asked for meanwhile.
    """
    sizes = _literals(heads, vectors, half)
    if sizes is None:
        return None
    m, n, is_half = sizes

    def codegen(context, b, sig, args):
        p, p_row, v, v_row, count, ahead, out, out_row = args[3:]
        acc = _zeros(b, m * n)
        with cgutils.for_range(b, count, intp=I64) as loop:
            at_v = ir_at(b, v, b.mul(v_row, loop.index))
            at_p = ir_at(b, p, (loop.index, 4))
            for offset in range(0, n * (32 if is_half else 64), 64):
                ir_prefetch(b, ir_at(b, at_v, offset, ahead))
            values = [ir_lanes(b, ir_at(b, at_v, (32 if is_half else 64) * j), is_half) for j in range(n)]
            for i in range(m):
                weight = ir_splat(b, ir_load(b, ir_at(b, at_p, (p_row, i)), F32, 4))
                for j in range(n):
                    slot = acc[i * n + j]
                    b.store(ir_fma(b, weight, values[j], b.load(slot)), slot)
        for i in range(m):
            for j in range(n):
                ir_store(b, b.load(acc[i * n + j]), ir_at(b, out, (out_row, i), 64 * j), 4)
        return context.get_dummy_value()

    return types.void(heads, vectors, half, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def transpose(typingctx, gather, rows, offset, tile, tile_row):
    """Sixteen row vectors, whose int64 addresses lie at `rows`, plus `offset` bytes, against a 16×16 tile of stride tile_row.

    Literal gather: 1 reads the row vectors and writes them as the tile's columns; 0 reads the tile and writes its columns to
    the row vectors. Float32 on both sides.
    """
    sizes = _literals(gather)
    if sizes is None:
        return None

    def codegen(context, b, sig, args):
        rows, offset, tile, tile_row = args[1:]
        outside = [ir_at(b, ir_load(b, ir_at(b, rows, 8 * i), I64, 8), offset) for i in range(LANES)]
        inside = [ir_at(b, tile, (tile_row, i)) for i in range(LANES)]
        source, target = (outside, inside) if sizes[0] else (inside, outside)
        v = [ir_load(b, address, VF, 4) for address in source]
        # exchange off-diagonal blocks of 8, 4, 2 and 1 elements
        width = LANES // 2
        while width:
            low = [i if not i & width else LANES + (i ^ width) for i in range(LANES)]
            high = [(i ^ width) if not i & width else LANES + i for i in range(LANES)]
            for i in range(LANES):
                if not i & width:
                    x, y = v[i], v[i | width]
                    v[i], v[i | width] = ir_shuffle(b, x, y, low), ir_shuffle(b, x, y, high)
            width //= 2
        for value, address in zip(v, target, strict=True):
            ir_store(b, value, address, 4)
        return context.get_dummy_value()

    return types.void(gather, *[types.int64] * 4), codegen
