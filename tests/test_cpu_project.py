"""Packed projections against float64 NumPy on dequantised weights, and against each other bit for bit."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from m40llm.gguf import BLOCKS, TensorType, dequantize
from m40llm.ops.cpu.arena import Arena
from m40llm.ops.cpu.elementwise import rmsnorm
from m40llm.ops.cpu.formats import FLOATS, FORMATS
from m40llm.ops.cpu.isa import ISA, IsaError, choose_isa, supported_isas
from m40llm.ops.cpu.packing import PackedMatrix, pack_matrix
from m40llm.ops.cpu.program import Program, Workers
from m40llm.ops.cpu.project import Projection, record_gate_up_swiglu, record_project
from m40llm.ops.cpu.quantise import Norm, QuantisedRows, record_quantise

KINDS = [*FORMATS, *FLOATS]
# where the FP16 scales of a block are; everything else in a block may be any bytes
HALVES = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}
ROWS = (1, 2, 3, 7, 8, 9, 33)
BEST = supported_isas()[0]


def random_weights(kind: TensorType, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """(n, row bytes) uint8: random blocks with finite scales of either sign."""
    if kind in FLOATS:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if kind is TensorType.BF16:
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.astype(np.float16 if kind is TensorType.F16 else np.float32).view(np.uint8)
    block = BLOCKS[kind]
    raw = rng.integers(0, 256, (n, k // block.block_size, block.type_size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.uniform(0.5, 2, (*raw.shape[:2], 1)) * rng.choice([-1, 1], (*raw.shape[:2], 1))
        raw[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(n, -1)


def k_of(kind: TensorType) -> int:
    if kind in FLOATS:
        return 77
    return 512 if BLOCKS[kind].block_size == 256 else 608


def rounded(x: np.ndarray) -> np.ndarray:
    """What the integer kernels see of x: sx * v per block of 32, from the definition."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest < 1e-30, 0, np.float32(32639) / largest)
    scale = np.where(largest < 1e-30, 0, largest / np.float32(32639)).astype(np.float64)
    return (np.rint(blocks * inverse) * scale).reshape(x.shape)


@pytest.fixture(scope="module")
def workers():
    with Workers(1) as workers:  # threads that meet at barriers make no sense where tests run in parallel
        yield workers


def pack(raw: np.ndarray, kind: TensorType, k: int, workers: Workers) -> PackedMatrix:
    return pack_matrix(lambda start, stop: raw[start:stop], kind, len(raw), k, workers)


def run(matrix, x, workers, isa=BEST, rows=None, **options) -> np.ndarray:
    count = len(x) if rows is None else len(rows)
    out = options.pop("out", None)
    out = np.full((count, matrix.n), np.nan, np.float32) if out is None else out
    scratch = QuantisedRows(count, x.shape[1], isa)
    program = Program()
    record_quantise(program, x, scratch, rows)
    record_project(program, [Projection(matrix, out, **options)], scratch)
    program.run(workers)
    return out


def check(y: np.ndarray, x: np.ndarray, weights: np.ndarray, integers: bool) -> None:
    exact = rounded(x) if integers else x.astype(np.float64)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weights).T
    # float32 sums of K/32 terms; K-quants subtract minimums several times the size of the weights
    # (the second bound is one of statistics: rounding x costs about 7e-5 / sqrt(K), and five times that at most)
    assert np.all(np.abs(y - exact @ weights.T) <= 4e-6 * magnitude)
    assert np.all(np.abs(y - x.astype(np.float64) @ weights.T) <= 3e-5 * magnitude)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_against_float64(kind, workers):
    rng, k = np.random.default_rng(int(kind)), k_of(kind)
    raw = random_weights(kind, 576, k, rng)
    weights = dequantize(raw, kind).astype(np.float64)
    x = rng.standard_normal((max(ROWS), k)).astype(np.float32)
    x[0, :32] = 0  # a block of zeros has no scale
    for n in (16, 48, 100, 576):
        matrix = pack(raw[:n], kind, k, workers)
        whole = run(matrix, x, workers)
        check(whole, x, weights[:n], kind in FORMATS)
        for t in ROWS:
            # rows do not depend on how many are computed together, not even in the last bit
            assert np.array_equal(run(matrix, x[:t], workers), whole[:t]), (n, t)


def compare_isas(kind: TensorType, isa: ISA, rows: tuple[int, ...], workers: Workers) -> None:
    rng, k = np.random.default_rng(1), k_of(kind)
    matrix = pack(random_weights(kind, 40, k, rng), kind, k, workers)
    x = (rng.standard_normal((max(rows), k)) * np.exp(2 * rng.standard_normal((max(rows), k)))).astype(np.float32)
    for t in rows:
        assert np.array_equal(run(matrix, x[:t], workers, isa), run(matrix, x[:t], workers))


@pytest.mark.parametrize("isa", supported_isas()[1:], ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_K", "Q6_K", "IQ4_XS", "F16"])
def test_instruction_sets_agree(kind, isa, workers):
    compare_isas(TensorType[kind], isa, (1, 8), workers)


@pytest.mark.slow
@pytest.mark.parametrize("isa", supported_isas()[1:], ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_instruction_sets_agree_everywhere(kind, isa, workers):
    compare_isas(kind, isa, (1, 2, 3, 15), workers)


def test_largest_integers_do_not_overflow(workers):
    """All weights 127 and all activations at the limit: the largest sums that can occur."""
    raw = np.full((16, 34), 127, np.uint8)
    raw[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    matrix = pack(raw, TensorType.Q8_0, 32, workers)
    x = np.ones((1, 32), np.float32)
    for isa in supported_isas():
        for sign in (1, -1):
            assert np.allclose(run(matrix, sign * x, workers, isa), sign * 127 * 32, rtol=1e-6)


def test_threads_agree(workers):
    rng = np.random.default_rng(2)
    raw, x = random_weights(TensorType.Q4_1, 100, 96, rng), rng.standard_normal((9, 96)).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        with Workers(threads) as some:
            results.append(run(pack(raw, TensorType.Q4_1, 96, some), x, some))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("kind", [TensorType.Q4_1, TensorType.F16], ids=lambda kind: kind.name)
def test_bias_residual_strides_and_row_index(kind, workers):
    rng = np.random.default_rng(3)
    raw = random_weights(kind, 40, 96, rng)
    matrix, weights = pack(raw, kind, 96, workers), dequantize(raw, kind).astype(np.float64)
    wide, outer = rng.standard_normal((10, 128)).astype(np.float32), rng.standard_normal((3, 70)).astype(np.float32)
    before, bias = outer.copy(), rng.standard_normal(40).astype(np.float32)
    rows = np.array([9, 0, 4], np.int32)
    x = wide[:, 7:103]
    run(matrix, x, workers, rows=rows, bias=bias, add=True, out=outer[:, 20:60])
    check(outer[:, 20:60] - before[:, 20:60] - bias, np.ascontiguousarray(x[rows]), weights, kind in FORMATS)
    assert np.array_equal(outer[:, :20], before[:, :20])
    assert np.array_equal(outer[:, 60:], before[:, 60:])


@pytest.mark.parametrize("up_kind", ["Q4_1", "F16"])
@pytest.mark.parametrize("t", [1, 9])
def test_gate_up_swiglu(up_kind, t, workers):
    rng = np.random.default_rng(4)
    kinds = TensorType.Q4_1, TensorType[up_kind]
    raws = [random_weights(kind, 100, 96, rng) for kind in kinds]
    gate, up = (pack(raw, kind, 96, workers) for raw, kind in zip(raws, kinds, strict=True))
    x = rng.standard_normal((t, 96)).astype(np.float32)
    out, scratch, program = np.zeros((t, 100), np.float32), QuantisedRows(t, 96, BEST), Program()
    record_quantise(program, x, scratch)
    record_gate_up_swiglu(program, gate, up, scratch, out)
    program.run(workers)
    g, u = (run(m, x, workers).astype(np.float64) for m in (gate, up))
    assert np.abs(g).max() > 90  # also where exp(-g) is larger than float32 holds
    assert np.allclose(out, g / (1 + np.exp(-g)) * u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", [None, [2, 0, 2]], ids=["all rows", "some rows"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("t", [1, 3, 11])
def test_norm_on_the_way(t, threads, index):
    """Bit for bit what the norm's own kernel and then the quantisation give."""
    rng = np.random.default_rng(8)
    rows = None if index is None else np.array(index, np.int32) % t
    x, weight = (10 * rng.standard_normal(shape).astype(np.float32) for shape in ((t, 160), 160))
    count = t if rows is None else len(rows)
    normed, apart, fused = (QuantisedRows(16, 160, BEST) for _ in range(3))
    out, y = np.zeros((count, 160), np.float32), np.zeros((2, count, 48), np.float32)
    with Workers(threads) as workers:
        matrix = pack(random_weights(TensorType.Q8_0, 48, 160, rng), TensorType.Q8_0, 160, workers)
        program = Program()
        program.add(rmsnorm, x=x, weight=weight, out=out, index=rows, rows=count, width=160, eps=1e-5)
        record_quantise(program, out, apart)
        record_project(program, [Projection(matrix, y[0])], apart)
        record_quantise(program, x, fused, rows, Norm(weight, 1e-5))
        record_project(program, [Projection(matrix, y[1])], fused)
        program.run(workers)
    assert y[0].any()
    assert np.array_equal(y[0], y[1])
    record_quantise(program, x, normed, rows, Norm(weight, 1e-5))
    with pytest.raises(ValueError, match="take the output of a norm"):
        normed.record(program, quantised=False)


def test_several_inputs_share_scratch(workers):
    """One program, two inputs after each other, and two matrices on one of them."""
    rng = np.random.default_rng(5)
    raw = random_weights(TensorType.Q8_0, 48, 96, rng)
    matrix = pack(raw, TensorType.Q8_0, 96, workers)
    x = rng.standard_normal((3, 96)).astype(np.float32)
    y = rng.standard_normal((2, 96)).astype(np.float32)
    outs = [np.zeros((len(a), 48), np.float32) for a in (x, x, y)]
    scratch, program = QuantisedRows(4, 96, BEST), Program()
    record_quantise(program, x, scratch)
    record_project(program, [Projection(matrix, outs[0]), Projection(matrix, outs[1])], scratch)
    record_quantise(program, y, scratch)
    record_project(program, [Projection(matrix, outs[2])], scratch)
    for _ in range(3):
        program.run(workers)
        assert np.array_equal(outs[0], run(matrix, x, workers))
        assert np.array_equal(outs[1], outs[0])
        assert np.array_equal(outs[2], run(matrix, y, workers))


def test_choice_of_instruction_set(monkeypatch):
    assert choose_isa() is BEST
    assert choose_isa("generic") is ISA.GENERIC
    with pytest.raises(IsaError, match="unknown instruction set 'sse9'; choose one of auto, "):
        choose_isa("sse9")
    monkeypatch.setattr("m40llm.ops.cpu.isa.llvm.get_host_cpu_features", dict)
    assert choose_isa() is ISA.GENERIC
    with pytest.raises(IsaError, match="this processor has no avx2; choose one of auto, generic"):
        choose_isa("AVX2")


def test_wrong_shapes_are_refused(workers):
    raw = random_weights(TensorType.Q8_0, 16, 96, np.random.default_rng(6))
    matrix = pack(raw, TensorType.Q8_0, 96, workers)
    x = np.zeros((2, 96), np.float32)
    with pytest.raises(ValueError, match="the input has 64 columns, the matrix 96"):
        run(matrix, np.zeros((2, 64), np.float32), workers)
    with pytest.raises(ValueError, match=r"out must be \(2, 16\)"):
        run(matrix, x, workers, out=np.zeros((2, 17), np.float32))
    with pytest.raises(ValueError, match=r"bias must be \(16,\)"):
        run(matrix, x, workers, bias=np.zeros(15, np.float32))
    with pytest.raises(ValueError, match="do not fit scratch for 1 rows of 96"):
        record_quantise(Program(), x, QuantisedRows(1, 96, BEST))
    with pytest.raises(ValueError, match="record_quantise comes before"):
        record_project(Program(), [Projection(matrix, np.zeros((1, 16), np.float32))], QuantisedRows(1, 96, BEST))
    with pytest.raises(ValueError, match="no projection kernel"):
        pack(raw, TensorType.IQ1_S, 96, workers)
    with pytest.raises(ValueError, match="no multiple of the block"):
        pack(raw, TensorType.Q8_0, 95, workers)
    with pytest.raises(ValueError, match="rows 0 to 16 came as"):
        pack_matrix(lambda start, stop: raw[:3], TensorType.Q8_0, 16, 96, workers)


def test_matrices_packed_into_an_arena(workers):
    """Also across the end of a chunk, and for a matrix larger than one."""
    rng, arena = np.random.default_rng(7), Arena(chunk_bytes=40_000)
    for n in (16, 100, 576, 48, 16):
        raw, x = random_weights(TensorType.Q4_1, n, 96, rng), rng.standard_normal((2, 96)).astype(np.float32)
        matrix = pack_matrix(lambda a, b, raw=raw: raw[a:b], TensorType.Q4_1, n, 96, workers, None, arena)
        assert matrix.quants.ctypes.data % 64 == matrix.scales.ctypes.data % 64 == 0
        assert np.array_equal(run(matrix, x, workers), run(pack(raw, TensorType.Q4_1, 96, workers), x, workers))


def test_second_process_compiles_nothing(tmp_path):
    script = textwrap.dedent("""
        from test_cpu_project import *
        compiled = []
        with Workers(1) as workers:
            raw = random_weights(TensorType.Q4_K, 16, 256, np.random.default_rng(0))
            matrix = pack_matrix(lambda a, b: raw[a:b], TensorType.Q4_K, 16, 256, workers, compiled.append)
            scratch, program = QuantisedRows(9, 256, BEST), Program(compiled.append)
            record_quantise(program, np.ones((9, 256), np.float32), scratch)
            out = np.zeros((9, 16), np.float32)
            record_project(program, [Projection(matrix, out)], scratch)
            record_gate_up_swiglu(program, matrix, matrix, scratch, out)
            program.run(workers)
        print(len(compiled))
    """)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.append(int(done.stdout))
    assert outputs == [7, 0]  # packing 2, quantise, tiles for 8 and 1 rows, project, gate_up_swiglu
