"""Argmax and top-k in the emulator: exact, also for equal logits, NaN, infinities and signed zeros."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.ops.cuda import reduce
from m40llm.ops.cuda.reduce import ReduceScratch
from tests import reference
from tests.cuda_arrays import DEVICES, Arrays, kernel_device

VOCABULARIES = (1, 31, 257, 4096, 4097, 9001)


@pytest.fixture(scope="module", params=DEVICES)
def arrays(request: pytest.FixtureRequest) -> Iterator[Arrays]:
    with Arrays(kernel_device(request.param)) as made:
        yield made


def best(arrays: Arrays, logits: np.ndarray, times: int = 1) -> np.ndarray:
    rows, vocab = logits.shape
    count = rows * reduce.argmax_blocks(vocab)
    scratch = ReduceScratch(arrays.poisoned((count,), np.uint64), arrays.zeros((rows,), np.uint32))
    ids, device_logits = arrays.poisoned((rows,), np.int32), arrays.put(logits)
    for _ in range(times):
        reduce.argmax(arrays.device, device_logits, ids, scratch)
    return arrays.get(ids)


def k_best(arrays: Arrays, logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows, vocab = logits.shape
    count = rows * reduce.topk_partials(vocab, k)
    scratch = ReduceScratch(arrays.poisoned((count,), np.uint64), arrays.zeros((rows,), np.uint32))
    values, ids = arrays.poisoned((rows, k)), arrays.poisoned((rows, k), np.int32)
    reduce.topk(arrays.device, arrays.put(logits), values, ids, scratch)
    return arrays.get(values), arrays.get(ids)


def random(rows: int, vocab: int, levels: int | None = None) -> np.ndarray:
    """`levels`: how many different values there are (None: no limit)."""
    rng = np.random.default_rng(vocab + rows)
    x = rng.standard_normal((rows, vocab)) * 10
    return (x if levels is None else np.round(x * levels / 40)).astype(np.float32)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_argmax(arrays: Arrays, rows: int, vocab: int) -> None:
    logits = random(rows, vocab)
    assert np.array_equal(best(arrays, logits), logits.argmax(axis=1))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_argmax_of_equals_is_the_lowest_id(arrays: Arrays, vocab: int) -> None:
    logits = random(3, vocab, levels=2)
    assert np.array_equal(best(arrays, logits), logits.argmax(axis=1))


def test_argmax_counts_its_blocks_anew_every_time(arrays: Arrays) -> None:
    logits = random(2, 9001)
    assert np.array_equal(best(arrays, logits, times=3), logits.argmax(axis=1))


def test_argmax_of_odd_values(arrays: Arrays) -> None:
    inf, nan = np.inf, np.nan
    logits = np.array(
        [[-inf, -inf, -1e30], [nan, -inf, nan], [nan, nan, nan], [-0.0, 0.0, -1], [1, inf, inf]], np.float32
    )
    assert best(arrays, logits).tolist() == [2, 0, 0, 0, 1]
    assert np.array_equal(best(arrays, logits), reference.argmax(logits))


@pytest.mark.parametrize("vocab", [40, 257, 4097, 9001])
@pytest.mark.parametrize("levels", [None, 5])
def test_topk(arrays: Arrays, vocab: int, levels: int | None) -> None:
    logits = random(2, vocab, levels)
    values, ids = k_best(arrays, logits, 40)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :40]
    assert np.array_equal(ids, expected)
    assert np.array_equal(values, np.take_along_axis(logits, expected, axis=1))


def test_topk_of_odd_values(arrays: Arrays) -> None:
    logits = np.array([[np.nan, 1, -np.inf, np.inf]], np.float32)
    values, ids = k_best(arrays, logits, 4)
    assert ids.tolist() == [[3, 1, 0, 2]]
    assert values.tolist() == [[np.inf, 1, -np.inf, -np.inf]]


def test_topk_of_too_many_is_refused() -> None:
    assert reduce.topk_partials(262144, 64) == 4096
    with pytest.raises(ValueError, match="selects up to 64"):
        reduce.topk_partials(262144, 65)
    with pytest.raises(ValueError, match="the 5 best of 4 logits"):
        reduce.topk_partials(4, 5)


def test_kasan_finds_nothing() -> None:
    with Arrays(EmulatorDevice("kasan")) as arrays:
        logits = random(1, 300)
        assert best(arrays, logits)[0] == logits.argmax()
        assert k_best(arrays, logits, 3)[1][0, 0] == logits.argmax()
