"""The pure parts of the serving benchmark: percentiles, windows, workloads, arrival times, tables."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))  # scripts beside each other, no package

from serving_load import WORKLOADS, calls_of, lengths_of, longest, poisson_arrivals, start_offsets
from serving_report import milliseconds, spread
from serving_stats import Record, gaps_within, percentile, summarize, together


def take(count: int, length: int) -> list[list[int]]:
    return [list(range(length)) for _ in range(count)]


def record(*arrivals: float, due: float = 0.0, tokens: int | None = None, status: int = 200) -> Record:
    return Record(due, list(arrivals), len(arrivals) if tokens is None else tokens, status=status)


def test_percentiles_by_hand() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_summary_counts_latency_of_all_and_tokens_of_the_window() -> None:
    records = [
        record(1.0, 1.5, 2.5, 9.0, due=0.5, tokens=8),  # two tokens a piece; one piece is late
        record(3.0, due=1.0),
        record(status=429),
        record(status=500),
        Record(0.0, [1.0], status=200, error="cut"),
    ]
    found = summarize(records, 0.0, 4.0)
    assert (found.requests, found.refused, found.failed) == (5, 1, 2)
    assert found.tok_s == (3 * 2 + 1) / 4.0
    assert found.ttft_p50 == (0.5 + 2.0) / 2
    assert (found.gap_p50, found.gap_max) == (1.0, 6.5)


def test_nothing_measured_is_no_number() -> None:
    found = summarize([], 0.0, 1.0)
    assert (found.tok_s, found.ttft_p99, found.gap_p50, found.gap_max) == (0.0, None, None, None)


def test_together_counts_only_while_all_decode() -> None:
    first, second = record(1.0, 2.0, 3.0, 4.0), record(2.0, 3.0, 4.0, 5.0)
    decode, whole = together([first, second], began=0.0)
    assert decode == (2 + 2) / (4.0 - 2.0)
    assert whole == 8 / 5.0
    with pytest.raises(ValueError, match="ended before"):
        together([record(1.0, 2.0), record(3.0, 4.0)], 0.0)
    with pytest.raises(ValueError, match="500"):
        together([first, record(status=500)], 0.0)


def test_gaps_that_overlap_a_window() -> None:
    records = [record(0.0, 1.0, 2.0, 5.0, 6.0), record(9.0)]
    assert gaps_within(records, 1.5, 4.0) == [1.0, 3.0]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_repeat_with_their_seed_and_fit(workload: str) -> None:
    first, again = (list(itertools.islice(lengths_of(workload, seed=3), 300)) for _ in range(2))
    assert first == again
    calls = list(itertools.islice(calls_of(workload, 3, take), 300))
    assert max(len(call.prompt) + call.max_tokens for call in calls) <= longest((workload,))
    assert min(min(len(call.prompt), call.max_tokens) for call in calls) >= 16


def test_the_mixed_workload_depends_on_the_seed_and_covers_its_range() -> None:
    one, two = (list(itertools.islice(lengths_of("mixed", seed), 500)) for seed in (1, 2))
    assert one != two
    assert min(each.prompt for each in one) < 20
    assert max(each.prompt for each in one) > 450


def test_a_shared_prefix_is_shared() -> None:
    unique = itertools.count()
    calls = itertools.islice(calls_of("shared-prefix", 0, lambda n, k: [[next(unique)] * k for _ in range(n)]), 3)
    prompts = [call.prompt for call in calls]
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024] for prompt in prompts}) == 3


def test_arrivals_are_poisson_and_start_offsets_stagger() -> None:
    times = poisson_arrivals(20.0, 500.0, seed=1)
    assert times == sorted(times) == poisson_arrivals(20.0, 500.0, seed=1)
    assert 0 < times[0] <= times[-1] < 500.0
    assert len(times) == pytest.approx(10_000, abs=400)  # 4 standard deviations
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(
        0.3679, abs=0.02
    )  # exp(-1) of them exceed the mean
    with pytest.raises(ValueError, match="never"):
        poisson_arrivals(0.0, 1.0, 0)
    assert start_offsets("short", 3) == [0.0, 0.0, 0.0]
    assert start_offsets("staggered", 3) == [0.0, 0.25, 0.5]


def test_cells() -> None:
    assert [milliseconds(s) for s in (None, 0.00123, 0.0234, 1.5)] == ["–", "1.23", "23.4", "1500"]
    assert spread([3.0, 1.0, 2.0]) == "2.0 (1.0–3.0)"
