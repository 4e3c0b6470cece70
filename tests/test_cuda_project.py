"""Projections against float64, for every type and row count class: 1e-5 of the sum of |x·w|, as the CPU's are."""

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.device.sources import KERNEL_DIR
from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cuda.norm import rmsnorm
from m40llm.ops.cuda.project import gate_up_swiglu, project
from m40llm.ops.cuda.staged import MIXED, Staging, staged_floats, staged_formats
from tests import reference
from tests.cuda_reference import ALL_TYPES, Bench, product_error

TOLERANCE = 1e-6  # ten times better than asked for: a wrong weight or scale is far above, FP32 rounding far below

MIXTURES = [tuple(name.upper() for name in names) for names in MIXED]


@pytest.fixture(scope="module")
def device():
    return EmulatorDevice("check", order="random", seed=1)


def few_columns(kind: TensorType) -> int:
    """More than one chunk of 1024, and not a multiple of it; no multiple of 4 where there are no blocks."""
    block = BLOCKS[kind].block_size
    return 1061 if block == 1 else 1120 if block == 32 else 1280


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_few_rows(device, kind, rows):
    columns = few_columns(kind)
    with Bench(device, rows) as bench:
        matrix = bench.matrix(kind, 37, columns)  # one group and a part more than a block of 32 rows
        x = bench.activations(rows, columns)
        out = bench.empty((rows, 37))
        project(device, bench.tensor(x), [matrix], [out])
        assert product_error(bench.read(out), x, bench.weights["w"]) < TOLERANCE


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda k: k.name)
def test_many_rows(device, kind):
    columns = 77 if BLOCKS[kind].block_size == 1 else max(96, BLOCKS[kind].block_size)
    with Bench(device) as bench:
        matrix = bench.matrix(kind, 131, columns)  # one tile of 128 and a part
        x = bench.activations(67, columns)  # one tile of 64 and a part
        out = bench.empty((67, 131))
        project(device, bench.tensor(x), [matrix], [out])
        assert product_error(bench.read(out), x, bench.weights["w"]) < TOLERANCE


def test_bias_and_residual(device):
    for rows in (1, 2, 8, 33):
        with Bench(device, rows) as bench:
            matrix = bench.matrix(TensorType.Q8_0, 36, 96)
            x, bias, before = (bench.activations(*shape) for shape in ((rows, 96), (1, 36), (rows, 36)))
            out = bench.tensor(before, "y")
            project(device, bench.tensor(x), [matrix], [out], [bench.tensor(bias[0])], add=True)
            assert product_error(bench.read(out), x, bench.weights["w"], bias + before) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 9])  # 9: two passes of eight in one launch
def test_one_launch_serves_q_k_and_v(device, rows):
    with Bench(device, rows) as bench:
        sizes = {"q": 70, "k": 33, "v": 32}
        matrices = [bench.matrix(TensorType.Q4_1, n, 160, name) for name, n in sizes.items()]
        x = bench.activations(rows, 160)
        biases = [bench.activations(1, n)[0] for n in sizes.values()]
        outs = [bench.empty((rows, n)) for n in sizes.values()]
        before = device.counters.launches
        project(device, bench.tensor(x), matrices, outs, [bench.tensor(biases[0]), None, bench.tensor(biases[2])])
        assert device.counters.launches == before + 1
        for name, out, bias in zip(sizes, outs, (biases[0], 0.0, biases[2]), strict=True):
            assert product_error(bench.read(out), x, bench.weights[name], bias) < TOLERANCE


@pytest.mark.parametrize(
    "kinds", [*((*tuple(pair), max(pair)) for pair in MIXTURES), ("Q4_0", "F16", "Q3_K")], ids="-".join
)
def test_matrices_of_different_types(device, kinds):
    mixed = tuple(sorted({k.lower() for k in kinds})) in MIXED
    for rows in (1, 4):
        with Bench(device, rows) as bench:
            matrices = [bench.matrix(TensorType[k], 35 + i, 512, str(i)) for i, k in enumerate(kinds)]
            x = bench.activations(rows, 512)
            outs = [bench.empty((rows, m.rows)) for m in matrices]
            before = device.counters.launches
            project(device, bench.tensor(x), matrices, outs)
            assert device.counters.launches - before == (1 if mixed else 3)
            for i, out in enumerate(outs):
                assert product_error(bench.read(out), x, bench.weights[str(i)]) < TOLERANCE


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q8_0", "F16")], ids="-".join)
@pytest.mark.parametrize("rows", [1, 4, 6, 33])
def test_gate_up_swiglu(device, rows, kinds):
    columns = 1280 if rows < 33 else 256
    with Bench(device, rows) as bench:
        gate, up = (
            bench.matrix(TensorType[k], 34, columns, name) for k, name in zip(kinds, ("gate", "up"), strict=True)
        )
        x = bench.activations(rows, columns)
        out = bench.empty((rows, 34))
        gate_up_swiglu(device, bench.tensor(x), gate, up, out)
        exact = x.astype(np.float64)
        expected = silu(exact @ bench.weights["gate"].T) * (exact @ bench.weights["up"].T)
        # silu's slope is at most 1.1, so either sum's error comes through at most times the other factor
        scale = (np.abs(exact) @ np.abs(bench.weights["gate"]).T) * (np.abs(exact) @ np.abs(bench.weights["up"]).T)
        assert np.abs(bench.read(out) - expected).max() < 1e-5 * scale.min()


QUANTISED = [kind for kind in ALL_TYPES if BLOCKS[kind].block_size > 1]


@pytest.mark.parametrize("kinds", [*((k.name,) for k in QUANTISED), *MIXTURES], ids="-".join)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_x_staged_by_the_norm(device, rows, kinds):
    """For one format and for the two of a mixture; more columns than lie in shared memory at once."""
    columns = 4352 if rows == 1 and len(kinds) == 2 else max(few_columns(TensorType[k]) for k in kinds)
    with Bench(device, rows) as bench:
        matrices = [bench.matrix(TensorType[k], 37 + i, columns, str(i)) for i, k in enumerate(kinds)]
        x, weight = bench.activations(rows, columns), bench.activations(1, columns)[0]
        h = bench.empty((rows, columns))
        staging = Staging({h.memory.ptr: bench.empty((len(kinds) * staged_floats(columns, rows),))})
        assert staged_formats(rows, matrices)
        rmsnorm(device, bench.tensor(x), bench.tensor(weight), 1e-5, staging.target(h, matrices))
        outs = [bench.empty((rows, m.rows)) for m in matrices]
        before = device.counters.launches
        project(device, staging.source(h), matrices, outs)
        assert device.counters.launches == before + 1
        normed = reference.rmsnorm(x.astype(np.float64), weight, 1e-5)
        for i, out in enumerate(outs):
            assert product_error(bench.read(out), normed, bench.weights[str(i)]) < TOLERANCE


@pytest.mark.parametrize("reader", ["Q8_0", "Q4_0", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_gate_and_up_stage_their_product(device, rows, reader):
    with Bench(device, rows) as bench:
        gate, up = (bench.matrix(TensorType.Q4_0, 1280, 64, name) for name in ("gate", "up"))
        down = bench.matrix(TensorType[reader], 5, 1280, "down")
        x = bench.activations(rows, 64)
        act, out = bench.empty((rows, 1280)), bench.empty((rows, 5))
        staging = Staging({act.memory.ptr: bench.empty((staged_floats(1280, rows),))})
        gate_up_swiglu(device, bench.tensor(x), gate, up, staging.target(act, [down]))
        project(device, staging.source(act), [down], [out])
        exact = x.astype(np.float64)
        product = silu(exact @ bench.weights["gate"].T) * (exact @ bench.weights["up"].T)
        assert product_error(bench.read(out), product, bench.weights["down"]) < 10 * TOLERANCE


def test_a_staged_tensor_is_for_its_readers_only(device):
    with Bench(device) as bench:
        a, b = bench.matrix(TensorType.Q8_0, 8, 256, "a"), bench.matrix(TensorType.Q4_0, 8, 256, "b")
        h, out = bench.empty((4, 256)), bench.empty((4, 8))
        staging = Staging({h.memory.ptr: bench.empty((staged_floats(256, 4),))})
        staging.target(h, [a])
        with pytest.raises(ValueError, match=r"staged for \('q8_0',\), is not for b"):
            project(device, staging.source(h), [b], [out])
        assert staging.target(h, []) is h
        assert staging.source(h) is h
        many = bench.empty((9, 256))
        assert Staging({many.memory.ptr: out}).target(many, [a]) is many  # two passes
        with pytest.raises(ValueError, match="do not fit"):
            Staging({h.memory.ptr: out}).target(h, [a])


def test_subnormal_free_unpacking_gives_the_same(tmp_path):
    """The other half of M40_DENORMAL_WEIGHTS, for cards whose FMA is slow on subnormals."""
    for source in [*KERNEL_DIR.glob("*.cuh")]:
        text = source.read_text().replace("#define M40_DENORMAL_WEIGHTS 1", "#define M40_DENORMAL_WEIGHTS 0")
        (tmp_path / source.name).write_text(text)
    kinds = (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q6_K)  # with fields that the mantissa has no room for
    for kind in kinds:
        name = f"project_{kind.name.lower()}.cu"
        (tmp_path / name).write_text((KERNEL_DIR / name).read_text())
    device = EmulatorDevice("fast", kernel_dir=tmp_path)
    for kind in kinds:
        for rows in (1, 4, 8, 33):
            with Bench(device, rows) as bench:
                matrix, x, out = bench.matrix(kind, 8, 256), bench.activations(rows, 256), bench.empty((rows, 8))
                project(device, bench.tensor(x), [matrix], [out])
                assert product_error(bench.read(out), x, bench.weights["w"]) < TOLERANCE


def test_no_overrun_between_shared_arrays():
    device = EmulatorDevice("kasan")
    with Bench(device) as bench:
        matrix = bench.matrix(TensorType.Q8_0, 5, 1120)
        for rows in (1, 2, 5, 33):
            x, out = bench.activations(rows, 1120), bench.empty((rows, 5))
            project(device, bench.tensor(x), [matrix], [out])
            assert product_error(bench.read(out), x, bench.weights["w"]) < TOLERANCE


def test_shapes_are_checked(device):
    with Bench(device) as bench:
        a, b = bench.matrix(TensorType.Q8_0, 8, 64, "a"), bench.matrix(TensorType.Q8_0, 9, 64, "b")
        x = bench.tensor(bench.activations(1, 64))
        with pytest.raises(ValueError, match=r"the output of a is float32 \(1, 9\)"):
            project(device, x, [a], [bench.empty((1, 9))])
        with pytest.raises(ValueError, match=r"the input of a is float32 \(1, 32\)"):
            project(device, bench.tensor(bench.activations(1, 32)), [a], [bench.empty((1, 8))])
        with pytest.raises(ValueError, match="gate and up must be alike"):
            gate_up_swiglu(device, x, a, b, bench.empty((1, 8)))
