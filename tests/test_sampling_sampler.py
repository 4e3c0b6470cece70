"""The sampler against a plain rendering of its definitions: full sorts, float64, one step after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from m40llm.config import SamplingParams
from m40llm.sampling import Sampler, SamplingError
from m40llm.sampling.candidates import draw, largest, near_maximum, nucleus

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def reference_distribution(logits: np.ndarray, params: SamplingParams, history: Sequence[int]) -> np.ndarray:
    """Probabilities (V,) float64 of the next token by the definitions in Sampler's docstring."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    n = params.repeat_last_n
    window = list(history if n < 0 else history[len(history) - min(n, len(history)) :])
    for token in set(window):
        x[token] = x[token] / params.repeat_penalty if x[token] > 0 else x[token] * params.repeat_penalty
        x[token] -= window.count(token) * params.frequency_penalty + params.presence_penalty
    if params.greedy:
        return (np.arange(len(x)) == x.argmax()).astype(np.float64)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    count = 1
    while params.top_p < 1 and count < len(order) and p[:count].sum() < params.top_p:
        count += 1
    order = order[: count if params.top_p < 1 else len(order)]
    order = [i for i in order if x[i] >= x[order[0]] + (math.log(params.min_p) if params.min_p else -math.inf)]
    out = np.zeros(len(x))
    out[order] = np.exp((x[order] - x[order[0]]) / params.temperature)
    return out / out.sum()


def gaussian_logits(n: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


GRID = [
    {"temperature": 1.0, **OFF},
    {"temperature": 0.7, **OFF, "top_k": 5},
    {"temperature": 1.3, **OFF, "top_p": 0.6},
    {"temperature": 1.0, **OFF, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, **OFF, "repeat_penalty": 1.5, "repeat_last_n": 4},
    {"temperature": 1.0, **OFF, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repeat_last_n": -1},
    {"temperature": 1.0, **OFF, "presence_penalty": 9.0, "repeat_last_n": 0},
    {"temperature": 1.0, **OFF, "logit_bias": ((3, 4.0), (7, -5.0), (3, 1.0))},
    {"temperature": 0.0, "repeat_penalty": 3.0, "logit_bias": ((1, 2.0),)},
]


@pytest.mark.parametrize("options", GRID, ids=str)
def test_frequencies_are_those_of_the_definition(options: dict) -> None:
    """Chi-square of 4,000 draws with a fixed seed; 5 sigma over its mean, and nothing drawn that has probability 0."""
    params = SamplingParams(seed=1234, **options)
    logits = gaussian_logits(23)
    history = [2, 5, 5, 9, 2, 11, 5, 0]
    expected = reference_distribution(logits, params, history)
    sampler = Sampler(params, history, len(logits))
    draws = 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5  # rarer tokens share one cell, as the chi-square approximation asks
    observed = np.append(counts[common], counts[~common].sum())
    mean = np.append(expected[common], expected[~common].sum()) * draws
    keep = mean > 0
    chi2 = float(((observed[keep] - mean[keep]) ** 2 / mean[keep]).sum())
    freedom = int(keep.sum()) - 1
    assert chi2 <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("options", GRID, ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 257, 5000, 40_000])
def test_support_is_that_of_the_definition(options: dict, size: int) -> None:
    """Every u of a fine grid draws a token of the reference's support, at every size of block and nucleus."""
    options = {**options, "logit_bias": tuple((t, b) for t, b in options.get("logit_bias", ()) if t < size)}
    params = SamplingParams(seed=7, **options)
    history = [t for t in (2, 5, 5, 9, 2, 11, 5, 0) if t < size]
    logits = gaussian_logits(size, seed=size)
    support = np.flatnonzero(reference_distribution(logits, params, history))
    sampler = Sampler(params, history, size)
    drawn = {sampler.sample(logits) for _ in range(60)}
    assert drawn <= set(support.tolist())


@pytest.mark.parametrize("n", [1, 2, 31, 64, 129, 4097, 20_000])
@pytest.mark.parametrize("quantised", [False, True])
def test_largest_equals_a_full_sort(n: int, quantised: bool) -> None:
    x = gaussian_logits(n, seed=n)
    if quantised:  # many ties
        x = np.round(x)
    order = np.array(sorted(range(n), key=lambda i: (-x[i], i)))
    for k in (1, 2, 40, n - 1, n, n + 5):
        if k > 0:
            np.testing.assert_array_equal(largest(x, k), np.sort(order[:k]))
    x[n // 2 :] = -np.inf
    np.testing.assert_array_equal(largest(x, n), np.arange(n // 2))
    np.testing.assert_array_equal(largest(x, n // 2 + 1), np.arange(n // 2))


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.95, 0.9999])
def test_nucleus_is_the_smallest_sufficient_set(p: float, spread: float) -> None:
    x = gaussian_logits(9000, spread=spread)
    if spread < 1:
        x = np.round(x, 2)  # many ties at the border
    order = np.argsort(-x, kind="stable")
    mass = np.cumsum(np.exp(x[order].astype(np.float64)))
    got = nucleus(x, p)
    np.testing.assert_array_equal(got, np.sort(order[: len(got)]))
    assert mass[len(got) - 1] / mass[-1] >= p - 1e-6
    assert len(got) == 1 or mass[len(got) - 2] / mass[-1] < p + 1e-6


def test_min_p_keeps_the_bound_itself() -> None:
    x = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float32))
    np.testing.assert_array_equal(near_maximum(x, 0.45), [0, 1])
    np.testing.assert_array_equal(near_maximum(x, 1.0), [0])


@pytest.mark.parametrize("n", [1, 5, 256, 257, 1000])
def test_draw_inverts_the_cumulative_distribution(n: int) -> None:
    x = gaussian_logits(n, spread=1.0)
    x[n // 3 : n // 2] = -np.inf
    p = np.exp(x.astype(np.float64) / 0.9)
    cumulative = np.cumsum(p / p.sum())
    for u in [0.0, *np.random.default_rng(1).random(200), np.nextafter(1.0, 0.0)]:
        got = draw(x, 0.9, float(u))
        assert p[got] > 0
        low = cumulative[got - 1] if got else 0.0
        assert low - 1e-6 <= u <= cumulative[got] + 1e-6


def test_the_lowest_number_does_not_draw_an_excluded_token() -> None:
    x = np.append(np.full(300, -np.inf), [0.0, 0.0]).astype(np.float32)
    assert draw(x, 1.0, 0.0) == 300


def test_same_seed_same_tokens_whatever_runs_beside_it() -> None:
    params = SamplingParams(seed=42)
    rows = [gaussian_logits(500, seed=i, spread=1.0) for i in range(30)]

    def text(interleaved: bool) -> list[int]:
        sampler, other = Sampler(params, [1, 2], 500), Sampler(SamplingParams(seed=5), [3], 500)
        out = []
        for row in rows:
            if interleaved:
                other.sample(row[::-1].copy())
            out.append(sampler.sample(row))
            sampler.accept(out[-1])
        return out

    assert text(False) == text(True)
    assert text(False) != [Sampler(SamplingParams(seed=43), [1, 2], 500).sample(row) for row in rows]


def test_a_near_tie_that_rounds_the_other_way_draws_the_same_token() -> None:
    low, high = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
    one, two = np.array([0, low, high, 0.5], np.float32), np.array([0, high, low, 0.5], np.float32)
    a, b = (Sampler(SamplingParams(seed=3, temperature=1.0, min_p=0.0), [], 4) for _ in range(2))
    assert [a.sample(one) for _ in range(200)] == [b.sample(two) for _ in range(200)]


def test_without_a_seed_two_samplers_differ_and_name_their_seed() -> None:
    logits = np.zeros(5000, np.float32)
    params = SamplingParams(**OFF)
    a, b = Sampler(params, [], 5000), Sampler(params, [], 5000)
    first = [a.sample(logits) for _ in range(8)]
    assert first != [b.sample(logits) for _ in range(8)]
    again = Sampler(SamplingParams(seed=a.seed, **OFF), [], 5000)
    assert first == [again.sample(logits) for _ in range(8)]


def test_penalty_window_slides_over_prompt_and_output() -> None:
    params = SamplingParams(temperature=0, presence_penalty=10.0, repeat_last_n=3)
    logits = np.array([5, 4, 3, 2, 1, 0], np.float32)
    sampler = Sampler(params, [0, 0, 0, 5, 5, 0], 6)
    out = []
    history = [0, 0, 0, 5, 5, 0]
    for _ in range(12):
        expected = int(reference_distribution(logits, params, history).argmax())
        out.append(sampler.sample(logits))
        assert out[-1] == expected
        sampler.accept(out[-1])
        history.append(out[-1])
    assert out[:4] == [1, 2, 3, 0]


def test_repeat_penalty_lowers_logits_of_either_sign() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=2.0)
    assert Sampler(params, [0], 2).sample(np.array([-1.0, -1.5], np.float32)) == 1
    assert Sampler(params, [0], 2).sample(np.array([1.5, 1.0], np.float32)) == 1


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 0, "presence_penalty": 1.0, "repeat_last_n": 0}, False),
        ({"temperature": 0, "presence_penalty": 1.0}, True),
        ({"temperature": 0, "repeat_penalty": 1.1}, True),
        ({"temperature": 0, "logit_bias": ((1, 1.0),)}, True),
        ({"temperature": 0.5}, True),
    ],
)
def test_needs_logits(options: dict, needed: bool) -> None:
    assert Sampler(SamplingParams(**options), [], 8).needs_logits is needed


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {**OFF, "temperature": 1e-30},
        {**OFF, "temperature": 5e-324},
        {**OFF, "logit_bias": ((7, 1e300), (3, -1e300))},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_edges_that_leave_one_token(options: dict) -> None:
    logits = gaussian_logits(300)
    logits[7] = 20
    sampler = Sampler(SamplingParams(seed=0, **options), [], 300)
    with np.errstate(all="raise", under="ignore"):
        assert {sampler.sample(logits) for _ in range(50)} == {7}


def test_all_minus_infinity_but_one() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[999] = -50
    for options in GRID:
        sampler = Sampler(SamplingParams(seed=0, **options), [], 1000)
        assert sampler.sample(logits) == 999


def test_logits_are_left_as_they_were() -> None:
    logits = gaussian_logits(50)
    before = logits.copy()
    Sampler(SamplingParams(repeat_penalty=2.0, logit_bias=((1, 5.0),)), [1, 2, 3], 50).sample(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}], ids=str)
@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, r"\+inf")])
def test_broken_logits_are_refused(options: dict, value: float, word: str) -> None:
    logits = gaussian_logits(50)
    logits[17] = value
    with pytest.raises(SamplingError, match=word):
        Sampler(SamplingParams(**options), [], 50).sample(logits)


def test_other_bad_input_is_refused() -> None:
    sampler = Sampler(SamplingParams(), [], 50)
    with pytest.raises(SamplingError, match="no token is left"):
        sampler.sample(np.full(50, -np.inf, np.float32))
    with pytest.raises(SamplingError, match="float64"):
        sampler.sample(np.zeros(50))
    with pytest.raises(SamplingError, match="made for"):
        sampler.sample(np.zeros(49, np.float32))
    with pytest.raises(SamplingError, match="token 50"):
        Sampler(SamplingParams(logit_bias=((50, 1.0),)), [], 50)
