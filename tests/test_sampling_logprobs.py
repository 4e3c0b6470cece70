"""Log-probabilities against float64 log-softmax."""

from __future__ import annotations

import numpy as np
import pytest

from m40llm.sampling import SamplingError, token_logprobs


def reference(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("n", [1, 7, 64, 5000, 152_064])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_equals_float64(n: int, offset: float) -> None:
    logits = (np.random.default_rng(n).standard_normal(n) * 4 + offset).astype(np.float32)
    expected = reference(logits)
    order = np.argsort(-expected, kind="stable")
    for top in (0, 1, 8, n, n + 3):
        if top > 5000:
            continue
        got = token_logprobs(logits, n // 2, top)
        assert got.logprob == pytest.approx(expected[n // 2], abs=2e-6)
        assert [i for i, _ in got.top] == order[:top].tolist()
        np.testing.assert_allclose([lp for _, lp in got.top], expected[order[:top]], atol=2e-6)


def test_excluded_tokens() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0], np.float32)
    got = token_logprobs(logits, 0, 4)
    assert got.logprob == -np.inf
    assert got.top == ((1, pytest.approx(np.log(0.5))), (3, pytest.approx(np.log(0.5))))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_refused(value: float) -> None:
    with pytest.raises(SamplingError, match="finite"):
        token_logprobs(np.array([0, value, 1], np.float32), 0, 1)
    with pytest.raises(SamplingError, match="finite"):
        token_logprobs(np.full(3, -np.inf, np.float32), 0, 1)
