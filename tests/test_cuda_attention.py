"""Decode and prefill attention in the emulator against float64 NumPy, 1e-5 of the largest value of V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import TensorType
from m40llm.kv import KVLayout
from m40llm.ops.cuda import attention
from m40llm.ops.cuda.attention import Scratch, Segments
from m40llm.ops.cuda.project import project
from m40llm.ops.cuda.staged import Staged, Staging, staged_floats
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.ops.protocol import KVCache
from tests import reference
from tests.cuda_arrays import DEVICES, Arrays, kernel_device
from tests.cuda_reference import Bench, product_error

POISON = 0x7E00  # an FP16 NaN: a key beyond a sequence's end shows wherever it is used


@pytest.fixture(scope="module", params=DEVICES)
def arrays(request: pytest.FixtureRequest) -> Iterator[Arrays]:
    with Arrays(kernel_device(request.param)) as made:
        yield made


class Case:
    """Segments of `queries` new tokens, `lengths` positions each, in slots that are neither ordered nor all used."""

    def __init__(
        self,
        arrays: Arrays,
        heads: int,
        kv_heads: int,
        head_dim: int,
        lengths: Sequence[int],
        queries: Sequence[int],
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        count = len(lengths)
        slots = rng.permutation(count + 1)[:count].astype(np.int32)
        self.arrays, self.heads, self.longest = arrays, heads, max(queries)
        self.layout = KVLayout(2, count + 1, max(lengths) + 5, kv_heads, head_dim, "f16")
        k = np.full(self.layout.shape, POISON, np.uint16)
        v = k.copy()
        for slot, length in zip(slots, lengths, strict=True):
            shape = (length, kv_heads, head_dim)
            k[1, slot, :length] = rng.standard_normal(shape).astype(np.float16).view(np.uint16)
            v[1, slot, :length] = rng.standard_normal(shape).astype(np.float16).view(np.uint16)
        self.k, self.v = k[1].view(np.float16), v[1].view(np.float16)
        self.cu = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
        self.lengths, self.slots = np.array(lengths, np.int32), slots
        rows = int(self.cu[-1])
        self.q = (2 * rng.standard_normal((rows, heads, head_dim))).astype(np.float32)
        self.kv = KVCache(self.layout, arrays.put(k, "K"), arrays.put(v, "V"))
        self.segments = Segments(arrays.put(self.cu), arrays.put(self.lengths), arrays.put(slots))
        self.device_q = arrays.put(self.q.reshape(rows, -1), "q")
        self.out = arrays.poisoned((rows, heads * head_dim))

    def check(self, window: int, rows: np.ndarray) -> None:
        """Compares the rows for which `rows` is true; the others must be untouched."""
        got = self.arrays.get(self.out).reshape(self.q.shape)
        expected = reference.attention(self.q, self.k, self.v, self.cu, self.lengths, self.slots, window)
        assert np.isnan(got[~rows]).all()
        assert np.isfinite(got[rows]).all()
        bound = 1e-5 * np.nanmax(np.abs(self.v.astype(np.float64)))
        assert np.abs(got - expected)[rows].max(initial=0) <= bound

    def decode(self, *, window: int = 0, splits: int | None = None, ldg: bool = False) -> None:
        self.launch_decode(self.out, window=window, splits=splits, ldg=ldg)
        self.check(window, np.repeat(np.diff(self.cu) == 1, np.diff(self.cu)))

    def launch_decode(
        self, out: DeviceTensor | Staged, *, window: int = 0, splits: int | None = None, ldg: bool = False
    ) -> None:
        arrays, count = self.arrays, len(self.lengths)
        parts = splits or attention.splits_for(
            arrays.device, count, self.layout.n_kv_heads, self.heads // self.layout.n_kv_heads, self.layout.context
        )
        places = count * self.heads * parts
        scratch = Scratch(
            arrays.poisoned((places * self.layout.head_dim,)),
            arrays.poisoned((places, 2)),
            arrays.zeros((count * self.heads,), np.uint32),
        )
        for _ in range(2):  # the second launch finds the arrival counters as the first one left them
            attention.attention_decode(
                arrays.device, self.device_q, self.kv, 1, self.segments, scratch, out, window=window, splits=splits, ldg=ldg
            )  # fmt: skip

    def prefill(self, *, window: int = 0) -> None:
        attention.attention_prefill(
            self.arrays.device, self.device_q, self.kv, 1, self.segments, self.longest, self.out, window=window
        )  # fmt: skip
        self.check(window, np.repeat(np.diff(self.cu) > 1, np.diff(self.cu)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 1), (8, 1), (11, 1)])
def test_decode_of_grouped_heads(arrays: Arrays, heads: int, kv_heads: int, head_dim: int) -> None:
    Case(arrays, heads, kv_heads, head_dim, [1, 33, 130], [1, 1, 1]).decode()


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "head_dim"),
    [("Q8_0", 1, 1, 64), ("Q5_0", 3, 1, 64), ("Q6_K", 4, 2, 64), ("Q4_K", 6, 1, 128)],
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", [(300, 7, 130), (300, 7, 130, 1, 40)], ids=len)
def test_decode_stages_its_rows(
    arrays: Arrays, kind: str, heads: int, kv_heads: int, head_dim: int, splits: int, lengths: tuple[int, ...]
) -> None:
    """For the projection that reads them, whichever block writes a head: its only one, or the one that merges."""
    rows, columns = len(lengths), heads * head_dim
    case = Case(arrays, heads, kv_heads, head_dim, list(lengths), [1] * rows)
    case.decode(splits=splits)
    plain = arrays.get(case.out)
    with Bench(arrays.device) as bench:
        matrix, projected = bench.matrix(TensorType[kind], 5, columns), bench.empty((rows, 5))
        staging = Staging({case.out.memory.ptr: bench.empty((staged_floats(columns, rows),))})
        case.launch_decode(staging.target(case.out, [matrix]), splits=splits)
        project(arrays.device, staging.source(case.out), [matrix], [projected])
        assert product_error(bench.read(projected), plain, bench.weights["w"]) < 1e-6


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 127, 128, 129, 300, 1000])
def test_decode_of_lengths(arrays: Arrays, length: int) -> None:
    Case(arrays, 3, 1, 64, [length], [1]).decode()


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_decode_does_not_depend_on_the_split(arrays: Arrays, splits: int) -> None:
    Case(arrays, 4, 2, 64, [400, 128, 257], [1, 1, 1]).decode(splits=splits)


@pytest.mark.parametrize("window", [1, 5, 32, 200, 1000])
def test_decode_in_a_window(arrays: Arrays, window: int) -> None:
    Case(arrays, 4, 2, 64, [1, 31, 333], [1, 1, 1]).decode(window=window, splits=2)


def test_decode_leaves_longer_segments_alone(arrays: Arrays) -> None:
    Case(arrays, 4, 2, 64, [9, 20, 150], [2, 1, 3]).decode()


def test_decode_through_the_read_only_cache(arrays: Arrays) -> None:
    Case(arrays, 3, 1, 64, [150], [1]).decode(ldg=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 1), (8, 1)])
def test_prefill_of_grouped_heads(arrays: Arrays, heads: int, kv_heads: int, head_dim: int) -> None:
    Case(arrays, heads, kv_heads, head_dim, [2, 40], [2, 9]).prefill()


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 31, 33, 65])
def test_prefill_of_lengths(arrays: Arrays, rows: int) -> None:
    """As a whole prompt and as a chunk that continues one."""
    Case(arrays, 3, 1, 64, [rows, rows + 37], [rows, rows]).prefill()


def test_prefill_over_a_long_history(arrays: Arrays) -> None:
    Case(arrays, 2, 1, 64, [1000], [3]).prefill()


@pytest.mark.parametrize("window", [1, 3, 32, 50, 1000])
def test_prefill_in_a_window(arrays: Arrays, window: int) -> None:
    Case(arrays, 2, 1, 64, [70, 100], [70, 5]).prefill(window=window)


def test_prefill_leaves_single_rows_alone(arrays: Arrays) -> None:
    Case(arrays, 4, 2, 64, [30, 5, 40], [1, 5, 1]).prefill()


def test_scores_of_any_size(arrays: Arrays) -> None:
    """Queries of 1e3 give scores of 1e4: the softmax is one key, nothing overflows."""
    case = Case(arrays, 2, 1, 64, [70], [3])
    case.q *= 1000
    case.device_q = arrays.put(case.q.reshape(3, -1))
    attention.attention_prefill(arrays.device, case.device_q, case.kv, 1, case.segments, 3, case.out)
    expected = reference.attention(case.q, case.k, case.v, case.cu, case.lengths, case.slots)
    assert np.abs(arrays.get(case.out).reshape(case.q.shape) - expected).max() < 3e-3


def test_what_no_kernel_computes_is_refused(arrays: Arrays) -> None:
    with pytest.raises(ValueError, match="heads of 64, 128, 256, not 80"):
        attention.check_heads(4, 4, 80)
    with pytest.raises(ValueError, match="groups of at most 32"):
        attention.check_heads(33, 1, 128)
    case = Case(arrays, 4, 2, 64, [300], [1])
    small = Scratch(arrays.zeros((64,)), arrays.zeros((1, 2)), arrays.zeros((2,), np.uint32))
    with pytest.raises(ValueError, match="do not fit into scratch"):
        attention.attention_decode(arrays.device, case.device_q, case.kv, 1, case.segments, small, case.out, splits=2)


@pytest.mark.parametrize(("kv_heads", "group", "context"), [(3, 3, 4096), (8, 4, 8192), (1, 8, 100), (2, 11, 600)])
def test_scratch_is_enough_for_every_step(kv_heads: int, group: int, context: int) -> None:
    heads = kv_heads * group
    device = EmulatorDevice("fast")
    enough = attention.scratch_places(device, 16, heads, kv_heads, context)
    for count in range(1, 17):
        assert count * heads * attention.splits_for(device, count, kv_heads, group, context) <= enough


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_any_order_of_threads(order: str) -> None:
    with Arrays(EmulatorDevice("check", order=order, seed=1)) as arrays:
        Case(arrays, 4, 2, 64, [150, 20], [1, 1]).decode()
        Case(arrays, 4, 2, 64, [40], [9]).prefill()


def test_kasan_finds_nothing() -> None:
    with Arrays(EmulatorDevice("kasan")) as arrays:
        Case(arrays, 2, 1, 64, [3], [1]).decode()
        Case(arrays, 2, 1, 64, [3], [2]).prefill()
