"""The CPU's KV cache: zeros, laid out as it says, on either size of pages."""

import numpy as np
import pytest

from m40llm.kv import KVLayout
from m40llm.ops.cpu.ops import CpuOps


@pytest.mark.parametrize("weights", [0, 1 << 20], ids=["small pages", "large pages"])
def test_slots_are_apart_and_empty(weights):
    layout = KVLayout(n_layers=3, n_slots=4, context=32, n_kv_heads=2, head_dim=16, dtype="f16")
    ops = CpuOps(threads=1)
    try:
        ops._weights.empty(weights)[:] = 255
        kv = ops.new_kv(layout)
        for cache in (kv.k, kv.v):
            assert cache.shape == layout.shape
            assert cache.dtype == layout.storage
            assert not cache.any()
            assert cache.flags.c_contiguous
        data = np.random.default_rng(0).integers(1, 1 << 15, (2, 3, 20, 2, 16), np.uint16)
        ops.write_kv(kv, 1, 5, data)
        ops.copy_kv(kv, 1, 3, 10, 25)
        assert np.array_equal(ops.read_kv(kv, 1, 5, 25), data)
        assert np.array_equal(ops.read_kv(kv, 3, 10, 25), data[:, :, 5:])
        assert not ops.read_kv(kv, 0, 0, 32).any()
        assert not ops.read_kv(kv, 2, 0, 32).any()
        assert not ops.read_kv(kv, 3, 0, 10).any()
        assert not ops.read_kv(kv, 3, 25, 32).any()
    finally:
        ops.close()
