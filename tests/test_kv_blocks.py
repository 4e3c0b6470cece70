"""Reading, writing and copying a slot's KV, on every backend: exactly the positions asked for, and no neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from m40llm.kv import KVLayout
from m40llm.ops.cpu import CpuOps
from m40llm.ops.cuda import CudaOps
from m40llm.ops.protocol import KVCache, Ops
from tests.cuda_arrays import DEVICES, kernel_device

LAYOUT = KVLayout(n_layers=3, n_slots=3, context=20, n_kv_heads=2, head_dim=16, dtype="f16")


@pytest.fixture(params=["cpu", *DEVICES])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[Ops, KVCache]]:
    ops: Ops
    ops = CpuOps(threads=1) if request.param == "cpu" else CudaOps(kernel_device(request.param))
    yield ops, ops.new_kv(LAYOUT)
    ops.close()


@pytest.fixture
def full(backend: tuple[Ops, KVCache]) -> tuple[Ops, KVCache, list[np.ndarray]]:
    """All slots filled with random bits, and these."""
    ops, kv = backend
    rng = np.random.default_rng(5)
    shape = (2, LAYOUT.n_layers, LAYOUT.context, LAYOUT.n_kv_heads, LAYOUT.head_dim)
    slots = [rng.integers(0, 1 << 16, shape).astype(np.uint16) for _ in range(LAYOUT.n_slots)]
    for slot, data in enumerate(slots):
        ops.write_kv(kv, slot, 0, data)
    return ops, kv, slots


def check(ops: Ops, kv: KVCache, slots: list[np.ndarray]) -> None:
    for slot, data in enumerate(slots):
        np.testing.assert_array_equal(ops.read_kv(kv, slot, 0, LAYOUT.context), data)


def test_a_range_is_read_as_a_copy(full: tuple[Ops, KVCache, list[np.ndarray]]) -> None:
    ops, kv, slots = full
    got = ops.read_kv(kv, 1, 3, 11)
    np.testing.assert_array_equal(got, slots[1][:, :, 3:11])
    got[...] = 0
    check(ops, kv, slots)


def test_a_range_is_written_and_nothing_else(full: tuple[Ops, KVCache, list[np.ndarray]]) -> None:
    ops, kv, slots = full
    data = np.arange(2 * 3 * 9 * 2 * 16, dtype=np.uint16).reshape(2, 3, 9, 2, 16)
    slots[1][:, :, 11:15] = data[:, :, 2:6]
    ops.write_kv(kv, 1, 11, data[:, :, 2:6])  # a view: part of a block
    data[...] = 0
    check(ops, kv, slots)


def test_a_range_is_copied_to_another_slot(full: tuple[Ops, KVCache, list[np.ndarray]]) -> None:
    ops, kv, slots = full
    ops.copy_kv(kv, 2, 0, 5, 20)
    slots[0][:, :, 5:20] = slots[2][:, :, 5:20]
    check(ops, kv, slots)
