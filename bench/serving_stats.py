"""What came back, in numbers: percentiles of first-token and inter-token times, tokens per second. No clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass
class Record:
    """One request as its client saw it. Times are seconds of one monotonic clock.

    `due` is when it should have been sent: an open loop counts from there, so that a late client does not flatter the server.
    `arrivals` has the time of every piece of text, `tokens` how many tokens the server says they are.
    """

    due: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def complete(self) -> bool:
        return self.status == 200 and not self.error and bool(self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text."""
        return self.arrivals[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces: the inter-token latency as a reader feels it."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens that arrived in (start, end]; where a piece was more than one token, they count evenly."""
        if not self.arrivals:
            return 0.0
        return self.tokens / len(self.arrivals) * sum(start < time <= end for time in self.arrivals)


@dataclass(frozen=True)
class Summary:
    """One line of the result. Times in seconds; None where nothing was measured."""

    requests: int
    refused: int
    failed: int
    cached_tokens: int
    tok_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    gap_max: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours, as NumPy's default; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


def summarize(records: Iterable[Record], start: float, end: float) -> Summary:
    """Latencies of all complete requests; tokens per second of what arrived between `start` and `end`."""
    records = list(records)
    complete = [record for record in records if record.complete]
    ttfts = [record.ttft for record in complete]
    gaps = [gap for record in complete for gap in record.gaps]
    refused = sum(record.status == 429 for record in records)
    return Summary(
        requests=len(records),
        refused=refused,
        failed=len(records) - refused - len(complete),
        cached_tokens=sum(record.cached_tokens for record in complete),
        tok_s=sum(record.tokens_between(start, end) for record in complete) / (end - start) if end > start else 0.0,
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
        gap_max=max(gaps, default=None),
    )


def together(records: Sequence[Record], began: float) -> tuple[float, float]:
    """(tokens per second while all of them decode, tokens per second from the start to the last token) of equal requests.

    The first excludes prefill, as llama.cpp's batch decode does: it counts from the moment when the last one has its first
    token to the moment when the first one ends.

    Raises:
        ValueError: one of them failed, or they never decoded at the same time.
    """
    if not all(record.complete for record in records):
        raise ValueError(f"a request failed: {[r.error or r.status for r in records if not r.complete]}")
    start = max(record.arrivals[0] for record in records)
    end = min(record.arrivals[-1] for record in records)
    if end <= start:
        raise ValueError("the first request ended before the last one began: ask for more tokens")
    last = max(record.arrivals[-1] for record in records)
    tokens = sum(record.tokens_between(start, end) for record in records)
    return tokens / (end - start), sum(record.tokens for record in records) / (last - began)


def gaps_within(records: Iterable[Record], start: float, end: float) -> list[float]:
    """Gaps that overlap (start, end): what a reader felt while something else went on."""
    return [
        after - before
        for record in records
        for before, after in zip(record.arrivals, record.arrivals[1:], strict=False)
        if after > start and before < end
    ]
