"""Projections against float64, for every type and row count class: 1e-5 of the sum of |x·w|, as the CPU's are."""

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cuda.project import project
from tests.cuda_reference import ALL_TYPES, Bench, product_error

TOLERANCE = 1e-6  # ten times better than asked for: a wrong weight or scale is far above, FP32 rounding far below


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
