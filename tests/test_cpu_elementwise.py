"""RMSNorm, SwiGLU, addition, argmax, embedding gather and the vector exponentials against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from m40llm.gguf import BLOCKS, TensorType, dequantize
from m40llm.ops.cpu.attention_tiles import transpose
from m40llm.ops.cpu.elementwise import add, argmax, argmax_merge, rmsnorm, swiglu
from m40llm.ops.cpu.embed import embed
from m40llm.ops.cpu.intrinsics import record
from m40llm.ops.cpu.program import Program, Workers, kernel, layout, pointer
from m40llm.ops.cpu.simd import exp2_v, exp_v, hsum, load, splat, store
from tests import reference, tolerances
from tests.tiny_gguf import random_blocks


@pytest.fixture(scope="module", params=[1, 2, 3])
def workers(request):
    with Workers(request.param) as w:
        yield w


def run(workers, kernel, **fields):
    program = Program()
    program.add(kernel, **fields)
    program.run(workers)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("width", [16, 100, 576, 1537])
def test_rmsnorm(rows, width, workers):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((rows + 3, width)) * 100).astype(np.float32)
    weight, out = rng.standard_normal(width).astype(np.float32), np.full((rows, width), np.nan, np.float32)
    run(workers, rmsnorm, x=x, weight=weight, out=out, index=None, rows=rows, width=width, eps=1e-5)
    np.testing.assert_allclose(out, reference.rmsnorm(x[:rows], weight, 1e-5), rtol=tolerances.RMSNORM)
    index = rng.integers(0, rows + 3, rows).astype(np.int32)
    run(workers, rmsnorm, x=x, weight=weight, out=out, index=index, rows=rows, width=width, eps=1e-5)
    np.testing.assert_allclose(out, reference.rmsnorm(x[index], weight, 1e-5), rtol=tolerances.RMSNORM)


def test_rmsnorm_of_large_and_zero_rows():
    """The sum of squares is beyond float32 in the first row; the second is all eps."""
    x = np.zeros((2, 64), np.float32)
    x[0] = 1e30
    out = np.empty_like(x)
    with Workers(1) as workers:
        run(workers, rmsnorm, x=x, weight=np.ones(64, np.float32), out=out, index=None, rows=2, width=64, eps=1e-6)
    np.testing.assert_allclose(out[0], 1.0, rtol=tolerances.RMSNORM)
    assert not out[1].any()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 4096])
def test_swiglu(size, workers):
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal(size) * 20).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    gate[:: max(1, size // 3)] = -3e38
    expected = reference.swiglu(gate, up)
    run(workers, swiglu, gate=gate, up=up, out=gate, size=size)
    np.testing.assert_allclose(gate, expected, rtol=tolerances.SWIGLU, atol=1e-36)


@pytest.mark.parametrize("size", [1, 31, 1000])
def test_add(size, workers):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    expected = x + y
    run(workers, add, x=x, y=y, size=size)
    assert np.array_equal(x, expected)


def greedy(logits: np.ndarray, workers: Workers) -> list[int]:
    rows, width = logits.shape
    ids = np.full(rows, -1, np.int32)
    fields = {
        "logits": logits, "rows": rows, "width": width, "ids": ids, "values": np.empty((workers.threads, rows), np.float32),
        "places": np.empty((workers.threads, rows), np.int32),
    }  # fmt: skip
    program = Program()
    program.add(argmax, **fields)
    program.add(argmax_merge, **fields)
    program.run(workers)
    return list(ids)


@pytest.mark.parametrize("width", [1, 2, 17, 1000, 49152])
def test_argmax(width, workers):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, width)).astype(np.float32)
    assert greedy(logits, workers) == list(reference.argmax(logits))
    logits = np.floor(logits)  # many equals: the lowest id wins
    assert greedy(logits, workers) == list(reference.argmax(logits))


def test_argmax_of_odd_rows(workers):
    logits = np.full((7, 100), -np.inf, np.float32)
    logits[1] = np.nan
    logits[2, ::2], logits[2, 51] = np.nan, -7
    logits[3, 99] = np.inf
    logits[4, [40, 70]] = 1.0, np.nan
    logits[5, :30] = np.nan
    logits[6, :60] = np.nan  # the first threads see nothing else
    assert greedy(logits, workers) == [0, 0, 51, 99, 40, 30, 60]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_embed_is_dequantisation_bit_for_bit(kind, workers):
    rng = np.random.default_rng(0)
    table = random_blocks(rng, kind, 20, 512, 1.0)
    token_ids = np.array([19, 0, 7, 7, 3], np.int32)
    x = np.full((5, 512), np.nan, np.float32)
    run(workers, embed(kind), table=table, token_ids=token_ids, x=x, rows=5, width=512)
    assert np.array_equal(x.view(np.uint32), dequantize(table[token_ids], kind).view(np.uint32))


def test_embed_refuses_other_types():
    with pytest.raises(ValueError, match="IQ1_S is not supported"):
        embed(TensorType.IQ1_S)


EXPONENTIALS = layout(x=pointer(np.float32), natural=pointer(np.float32), binary=pointer(np.float32), size=np.int64)


@kernel(EXPONENTIALS)
def exponentials(args, tid, threads):
    a = record(args, EXPONENTIALS)
    for i in range(0, 4 * a.size, 64):
        store(a.natural + i, exp_v(load(a.x + i)))
        store(a.binary + i, exp2_v(load(a.x + i)))


def test_exponentials_to_two_units_in_the_last_place():
    x = np.concatenate((np.linspace(-87, 88, 100_000), np.linspace(-1, 1, 100_000))).astype(np.float32)
    natural, binary = np.empty_like(x), np.empty_like(x)
    with Workers(1) as workers:
        run(workers, exponentials, x=x, natural=natural, binary=binary, size=x.size)
    for got, exact in ((natural, np.exp(x.astype(np.float64))), (binary, np.exp2(x.astype(np.float64)))):
        assert (np.abs(got - exact) / np.spacing(exact.astype(np.float32))).max() < 2


def test_exponentials_far_below_are_zero():
    x = np.array([-88, -200, -1e30, -np.inf] * 4, np.float32)
    natural, binary = np.full_like(x, np.nan), np.full_like(x, np.nan)
    with Workers(1) as workers:
        run(workers, exponentials, x=x, natural=natural, binary=binary, size=16)
    assert not natural.any()
    assert not binary[[1, 2, 3]].any()


TRANSPOSE = layout(rows=pointer(np.int64), tile=pointer(np.float32), back=pointer(np.int64), sums=pointer(np.float32))


@kernel(TRANSPOSE)
def transposed(args, tid, threads):
    a = record(args, TRANSPOSE)
    transpose(1, a.rows, 64, a.tile, 128)
    transpose(0, a.back, 0, a.tile, 128)
    for i in range(16):
        store(a.sums + 64 * i, splat(hsum(load(a.tile + 128 * i))))


def test_transpose_and_sums():
    x, back = np.arange(16 * 32, dtype=np.float32).reshape(16, 32), np.zeros((16, 16), np.float32)
    tile, sums = np.zeros((16, 32), np.float32), np.zeros((16, 16), np.float32)
    rows, targets = (np.array([row.ctypes.data for row in array]) for array in (x, back))
    with Workers(1) as workers:
        run(workers, transposed, rows=rows, tile=tile, back=targets, sums=sums)
    assert np.array_equal(tile[:, :16], x[:, 16:].T)
    assert not tile[:, 16:].any()
    assert np.array_equal(back, x[:, 16:])
    assert np.array_equal(sums[:, 0], x[:, 16:].sum(axis=0))
