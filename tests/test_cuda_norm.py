"""RMSNorm and the elementwise kernels in the emulator against float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.ops.cuda import norm
from tests.cuda_arrays import DEVICES, Arrays, kernel_device
from tests.reference import rmsnorm, silu

EPS = 1e-5
ROWS = (1, 2, 7, 8, 9, 33)
WIDTHS = (4, 64, 100, 577, 1028)  # 577: the scalar instance; 1028: beyond one vector per thread


@pytest.fixture(scope="module", params=DEVICES)
def arrays(request: pytest.FixtureRequest) -> Iterator[Arrays]:
    with Arrays(kernel_device(request.param)) as made:
        yield made


def rows_of(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, as the residual stream has them."""
    rng = np.random.default_rng(seed + rows * width)
    return (rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(np.float32)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """1e-5 of the row's largest value."""
    bound = 1e-5 * np.abs(expected).max(axis=-1, keepdims=True) + 1e-30
    assert np.isfinite(got).all()
    assert (np.abs(got - expected) <= bound).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ldg", [False, True])
def test_rmsnorm(arrays: Arrays, rows: int, width: int, ldg: bool) -> None:
    x, weight = rows_of(rows, width), rows_of(1, width, 1)[0]
    out = arrays.poisoned((rows, width))
    norm.rmsnorm(arrays.device, arrays.put(x), arrays.put(weight), EPS, out, ldg=ldg)
    assert_close(arrays.get(out), rmsnorm(x, weight, EPS))


@pytest.mark.parametrize("width", [4096, 4100, 5001])
def test_rmsnorm_of_rows_that_do_not_fit_into_registers(arrays: Arrays, width: int) -> None:
    x, weight = rows_of(2, width), rows_of(1, width, 1)[0]
    out = arrays.poisoned((2, width))
    norm.rmsnorm(arrays.device, arrays.put(x), arrays.put(weight), EPS, out)
    assert_close(arrays.get(out), rmsnorm(x, weight, EPS))


def test_rmsnorm_of_chosen_rows(arrays: Arrays) -> None:
    x, weight, chosen = rows_of(9, 68), rows_of(1, 68, 1)[0], np.array([8, 0, 3, 3], np.int32)
    out = arrays.poisoned((4, 68))
    norm.rmsnorm(arrays.device, arrays.put(x), arrays.put(weight), EPS, out, rows=arrays.put(chosen))
    assert_close(arrays.get(out), rmsnorm(x[chosen], weight, EPS))


def test_rmsnorm_of_zeros_is_zero(arrays: Arrays) -> None:
    out = arrays.poisoned((1, 64))
    norm.rmsnorm(arrays.device, arrays.zeros((1, 64)), arrays.put(np.ones(64, np.float32)), EPS, out)
    assert (arrays.get(out) == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("width", [4, 100, 577, 4100])
@pytest.mark.parametrize("ldg", [False, True])
def test_rmsnorm_add(arrays: Arrays, rows: int, width: int, ldg: bool) -> None:
    x, delta, weight = rows_of(rows, width), rows_of(rows, width, 2), rows_of(1, width, 1)[0]
    stream, out = arrays.put(x), arrays.poisoned((rows, width))
    norm.rmsnorm_add(arrays.device, stream, arrays.put(delta), arrays.put(weight), EPS, out, ldg=ldg)
    assert np.array_equal(arrays.get(stream), x + delta)
    assert_close(arrays.get(out), rmsnorm(x.astype(np.float64) + delta, weight, EPS))


@pytest.mark.parametrize("shape", [(1, 1), (1, 1023), (1, 1024), (3, 341), (7, 577)])
def test_elementwise(arrays: Arrays, shape: tuple[int, int]) -> None:
    gate, up = rows_of(*shape), rows_of(*shape, 3)
    x = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    device, g, u = arrays.device, arrays.put(gate), arrays.put(up)
    out, total = arrays.poisoned(shape), arrays.put(gate)
    norm.swiglu(device, g, u, out)
    assert_close(arrays.get(out), silu(gate) * up)
    norm.geglu(device, g, u, out)
    assert_close(arrays.get(out), gelu * up)
    norm.swiglu(device, g, u, g)  # in place
    assert_close(arrays.get(g), silu(gate) * up)
    norm.add(device, total, u)
    assert np.array_equal(arrays.get(total), gate + up)


def test_other_shapes_are_refused(arrays: Arrays) -> None:
    x, weight, out = arrays.zeros((2, 64)), arrays.zeros((60,)), arrays.zeros((2, 64))
    with pytest.raises(ValueError, match="weight is float32 \\(60,\\)"):
        norm.rmsnorm(arrays.device, x, weight, EPS, out)
    with pytest.raises(ValueError, match="operand 1"):
        norm.add(arrays.device, x, arrays.zeros((2, 60)))


def test_kasan_finds_nothing() -> None:
    with Arrays(EmulatorDevice("kasan")) as arrays:
        x, weight = rows_of(1, 37), rows_of(1, 37, 1)[0]
        out = arrays.poisoned((1, 37))
        norm.rmsnorm(arrays.device, arrays.put(x), arrays.put(weight), EPS, out)
        assert_close(arrays.get(out), rmsnorm(x, weight, EPS))
