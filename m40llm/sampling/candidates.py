"""The filters of the sampling chain, on float32 logits, without sorting the vocabulary.

Every function takes ``x``, logits (n,) f32 with a finite maximum and no NaN, and answers with positions in ``x``,
ascending. ``-inf`` marks a token that is excluded; among equal logits the lower position counts as the larger.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BLOCK = 64  # logits per block maximum: 152k logits become 2.4k maxima, small enough to partition in microseconds
FIRST_NUCLEUS = 256  # most nuclei are smaller; a wider one costs a second pass and the sort of thousands


def largest(x: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Positions of the ``k`` largest logits; fewer when fewer are above -inf."""
    at = _at_least(x, k)
    if len(at) <= k:
        return at
    values = x[at]
    return at[_top(values, np.partition(values, len(values) - k)[len(values) - k], k)]


def _at_least(x: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Positions of the ``k`` largest logits and of few others; only those above -inf."""
    if k >= len(x):
        return np.flatnonzero(x > -np.inf)
    sample = x
    blocks = len(x) // BLOCK
    if blocks >= 2 * k:  # else the k-th block maximum is a loose bound: a partition is cheaper than so many others
        sample = x[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    bound = np.partition(sample, len(sample) - k)[len(sample) - k]
    return np.flatnonzero(x > bound if np.isneginf(bound) else x >= bound)


def _top(x: NDArray[np.float32], threshold: np.float32, count: int) -> NDArray[np.intp]:
    """Positions of the ``count`` largest logits, of which ``threshold`` is the smallest."""
    at = np.flatnonzero(x >= threshold)
    surplus = len(at) - count
    return at if surplus == 0 else np.delete(at, np.flatnonzero(x[at] == threshold)[-surplus:])


def nucleus(x: NDArray[np.float32], p: float) -> NDArray[np.intp]:
    """Positions of the smallest set of largest logits whose softmax mass reaches ``p``; never empty.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1.
    """
    weights = np.exp(x - x.max())
    total = float(weights.sum(dtype=np.float64))
    at = _at_least(x, FIRST_NUCLEUS)
    if float(weights[at].sum(dtype=np.float64)) < p * total:
        # All weights below (1 - p) * total / n together are less than (1 - p) * total, so the nucleus is above.
        at = np.flatnonzero(weights >= (1 - p) * total / len(x))
    values = x[at]
    descending = np.sort(values)[::-1]
    reached = np.cumsum(np.exp(descending - descending[0]), dtype=np.float64)
    count = min(int(np.searchsorted(reached, p * total)) + 1, len(at))  # min: the two sums may round apart
    return at[_top(values, descending[count - 1], count)]


def near_maximum(x: NDArray[np.float32], p: float) -> NDArray[np.intp]:
    """Positions of the logits whose probability is at least ``p`` (0 < p <= 1) of the largest one's.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024, section 3.
    """
    return np.flatnonzero(x >= x.max() + np.float32(math.log(p)))


def draw(x: NDArray[np.float32], temperature: float, u: float) -> int:
    """The position at which the cumulative softmax of x / temperature, in order of position, passes ``u`` in [0, 1).

    Sums are float64 over blocks and then within one block, so that no float64 copy of a vocabulary is made.
    """
    scale = np.float32(max(temperature, float(np.finfo(np.float32).tiny)))  # 0 / 0 at the maximum would be NaN
    with np.errstate(over="ignore"):  # a tiny temperature sends every other logit to -inf: what it asks for
        weights = np.exp((x - x.max()) / scale)
    step = 256 if len(x) > 256 else len(x)
    starts = np.arange(0, len(x), step)
    reached = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = u * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), len(starts) - 1)
    inside = weights[starts[block] : starts[block] + step]
    target -= reached[block - 1] if block else 0.0
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target, side="right"))
    if place == len(inside):  # the two sums rounded apart at the block's end
        place = int(np.flatnonzero(inside)[-1])
    return int(starts[block]) + place
