"""RoPE and the append to the KV cache in the emulator, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from m40llm.config import RopeConfig
from m40llm.device.emulator import EmulatorDevice
from m40llm.kv import KVLayout
from m40llm.ops.cpu.rope import rope_tables
from m40llm.ops.cuda.rope import Positions, RopeTable, rope, rope_append
from m40llm.ops.protocol import KVCache
from tests import reference
from tests.cuda_arrays import DEVICES, Arrays, kernel_device

MAX_POS = 300


@pytest.fixture(scope="module", params=DEVICES)
def arrays(request: pytest.FixtureRequest) -> Iterator[Arrays]:
    with Arrays(kernel_device(request.param)) as made:
        yield made


def table_of(arrays: Arrays, config: RopeConfig) -> RopeTable:
    cos, sin = rope_tables(config, MAX_POS)
    return RopeTable(arrays.put(cos, "cos"), arrays.put(sin, "sin"), config.interleaved)


def random(rows: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def f16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (64, 16), (128, 128), (256, 64), (80, 40)])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (3, 9), (33, 2)])
def test_rope_in_place(arrays: Arrays, interleaved: bool, head_dim: int, dim: int, rows: int, heads: int) -> None:
    config = RopeConfig(theta=10000.0, dim=dim, interleaved=interleaved)
    pos = np.random.default_rng(rows).integers(0, MAX_POS, rows).astype(np.int32)
    values = random(rows, heads * head_dim, 1)
    x = arrays.put(values)
    rope(arrays.device, x, table_of(arrays, config), Positions(arrays.put(pos)), head_dim)
    expected = reference.rope(values.reshape(rows, heads, head_dim), pos, config).reshape(rows, -1)
    assert np.abs(arrays.get(x) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 128), (8, 1, 256)])
@pytest.mark.parametrize("on_device", [True, False])
def test_append(arrays: Arrays, interleaved: bool, heads: int, kv_heads: int, head_dim: int, on_device: bool) -> None:
    """K and V arrive where the layout says, rounded once; every other place of the cache stays as it was."""
    config = RopeConfig(theta=1e6, dim=head_dim, interleaved=interleaved)
    layout = KVLayout(2, 3, 40, kv_heads, head_dim, "f16")
    rows = 5
    if on_device:
        pos, slot = np.array([39, 0, 7, 8, 9], np.int32), np.array([0, 2, 1, 1, 1], np.int32)
        positions = Positions(arrays.put(pos), arrays.put(slot))
    else:
        pos, slot = np.arange(20, 25, dtype=np.int32), np.full(5, 2, np.int32)
        positions = Positions(first=20, slot=2)
    q_in, k_in, v_in = (random(rows, h * head_dim, i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    cache = KVCache(layout, arrays.poisoned(layout.shape, np.uint16), arrays.poisoned(layout.shape, np.uint16))
    q = arrays.put(q_in)
    rope_append(
        arrays.device, q, arrays.put(k_in), arrays.put(v_in), table_of(arrays, config), positions, cache, 1
    )  # fmt: skip

    rotated = reference.rope(q_in.reshape(rows, heads, head_dim), pos, config).reshape(rows, -1)
    assert np.abs(arrays.get(q) - rotated).max() <= 1e-5 * np.abs(rotated).max()
    k, v = arrays.get(cache.k), arrays.get(cache.v)
    written = np.zeros(layout.shape[:3], bool)
    written[1, slot, pos] = True
    assert (k[~written] == 0xFFFF).all()
    assert (v[~written] == 0xFFFF).all()
    assert np.array_equal(v[1, slot, pos], f16_bits(v_in).reshape(rows, kv_heads, head_dim))
    keys = reference.rope(k_in.reshape(rows, kv_heads, head_dim), pos, config)
    stored = k[1, slot, pos].view(np.float16).astype(np.float64)
    # half an ulp of FP16, and what float32 puts on the wrong side of it
    assert (np.abs(stored - keys) <= np.abs(keys) * 2**-11 * 1.001 + 2e-6).all()


def test_append_without_queries(arrays: Arrays) -> None:
    config = RopeConfig(theta=1e4, dim=64, interleaved=False)
    layout = KVLayout(1, 1, 4, 1, 64, "f16")
    cache = KVCache(layout, arrays.poisoned(layout.shape, np.uint16), arrays.poisoned(layout.shape, np.uint16))
    k = random(1, 64, 0)
    rope_append(
        arrays.device, None, arrays.put(k), arrays.put(k), table_of(arrays, config), Positions(first=0), cache, 0
    )  # fmt: skip
    # position 0 is not rotated: the exact FP16 bits
    assert np.array_equal(arrays.get(cache.k)[0, 0, 0, 0], f16_bits(k)[0])


def test_what_the_kernel_cannot_do_is_refused(arrays: Arrays) -> None:
    table = table_of(arrays, RopeConfig(theta=1e4, dim=6, interleaved=True))
    with pytest.raises(ValueError, match="3 pairs of a head of 64"):
        rope(arrays.device, arrays.zeros((1, 64)), table, Positions(), 64)


def test_kasan_finds_nothing() -> None:
    with Arrays(EmulatorDevice("kasan")) as arrays:
        config = RopeConfig(theta=1e4, dim=64, interleaved=True)
        x = arrays.put(random(1, 64, 0))
        rope(arrays.device, x, table_of(arrays, config), Positions(first=3), 64)
        assert np.isfinite(arrays.get(x)).all()
