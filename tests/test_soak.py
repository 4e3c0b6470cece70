"""The soak in short, with a small model; `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import Alone, Options, drift, run
from tests.tiny_gguf import build_tiny_gguf


def test_a_short_soak(tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", context=1024)
    outcome = run(Options(model, seconds=10.0, lives=2, phases=4))
    assert outcome.problems == []
    counts = outcome.counts
    for kind in (
        "whole",
        "streamed",
        "sampled",
        "leaves_stream",
        "leaves_early",
        "slow",
        "bad",
        "status 429",
        "status 400",
    ):
        assert counts[kind] > 0, kind
    assert counts["greedy answers as alone"] > 10 * counts["near ties"]


def test_agreement_with_the_answer_alone() -> None:
    alone = Alone(("a", "bc", "d"), (1.0, 0.01, 2.0))
    assert alone.agrees("abcd") is True
    assert alone.agrees("axx") is None  # at a near tie
    assert alone.agrees("abcx") is False
    assert alone.agrees("abc") is False
    assert alone.agrees("abcde") is False


def test_drift_leaves_the_warm_up_out() -> None:
    assert drift([1, 2, 100, 104, 96, 100, 98]) == pytest.approx(0.04)
    assert drift([100, 100, 100, 100, 112, 100]) == pytest.approx(0.12)
