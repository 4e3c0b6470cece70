"""Row gathers with dequantisation: exact, for every type, and refusing what does not fit."""

import numpy as np
import pytest

from m40llm.device import KernelFault
from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cuda.embed import dequantize, embed
from tests.cuda_reference import ALL_TYPES, Bench


@pytest.fixture(scope="module")
def device():
    return EmulatorDevice("check", order="random", seed=1)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda k: k.name)
def test_rows_equal_the_reference_bit_for_bit(device, kind):
    columns = 1280 if BLOCKS[kind].block_size > 1 else 1037
    with Bench(device) as bench:
        table = bench.matrix(kind, 11, columns)
        ids = np.array([10, 0, 3, 3, 7], np.int32)
        x = bench.empty((5, columns))
        embed(device, table, bench.tensor(ids), x)
        expected = bench.weights["w"][ids].astype(np.float32)
        np.testing.assert_array_equal(bench.read(x).view(np.uint32), expected.view(np.uint32))


def test_an_id_outside_the_vocabulary_stops_the_kernel(device):
    with Bench(device) as bench:
        table = bench.matrix(TensorType.Q8_0, 8, 64)
        for bad in (8, -1):
            with pytest.raises(KernelFault):
                embed(device, table, bench.tensor(np.array([bad], np.int32)), bench.empty((1, 64)))


def test_shapes_and_dtypes_are_checked(device):
    with Bench(device) as bench:
        table = bench.matrix(TensorType.Q8_0, 8, 64)
        ids = bench.tensor(np.array([1, 2], np.int32))
        with pytest.raises(ValueError, match=r"x is float32 \(2, 32\); the kernel needs float32 \(2, 64\)"):
            embed(device, table, ids, bench.empty((2, 32)))
        with pytest.raises(ValueError, match="token_ids is int64"):
            embed(device, table, bench.tensor(np.array([1, 2])), bench.empty((2, 64)))
        with pytest.raises(ValueError, match="out is int32"):
            dequantize(device, table, bench.empty((8, 64), np.int32))
