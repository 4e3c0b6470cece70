"""What the serving benchmark asks for, and when. No clock, no network: the same seed, the same load."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TakePrompts = Callable[[int, int], list[list[int]]]
"""(count, tokens) → so many prompts of so many token ids, each with another first token."""

PREFIX_TOKENS = 1024  # of the shared-prefix workload: a system prompt with its tools


@dataclass(frozen=True)
class Call:
    """One request: token ids and how many tokens to generate (ends of text are ignored)."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int


def lengths_of(workload: str, seed: int) -> Iterator[Lengths]:
    """Lengths without end, in the order in which they are asked for; `seed` matters where they vary.

    Raises:
        KeyError: no such workload.
    """
    lengths = _LENGTHS[workload]
    rng = random.Random(f"{workload} {seed}")
    return (lengths(rng, index) for index in itertools.count())


def calls_of(workload: str, seed: int, take: TakePrompts) -> Iterator[Call]:
    """Requests without end. Prompts share nothing, except in the shared-prefix workload."""
    prefix = take(1, PREFIX_TOKENS)[0] if workload == "shared-prefix" else []
    for each in lengths_of(workload, seed):
        yield Call((*prefix, *take(1, each.prompt)[0]), each.output)


def start_offsets(workload: str, clients: int) -> list[float]:
    """Seconds after which each client of a closed loop sends its first request."""
    return [STAGGER_SECONDS * i if workload == "staggered" else 0.0 for i in range(clients)]


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times of an open loop: exponential gaps of mean 1 / `rate`, sorted, all below `seconds`.

    Raises:
        ValueError: a rate that is not above zero.
    """
    if not rate > 0:
        raise ValueError(f"a rate of {rate} requests a second never sends one")
    rng = random.Random(f"arrivals {seed}")
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


STAGGER_SECONDS = 0.25  # clients of the staggered workload join one after the other, and so leave


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, round(math.exp(rng.uniform(math.log(low), math.log(high)))))


def _mixed(rng: random.Random, index: int) -> Lengths:
    return Lengths(_log_uniform(rng, 16, 512), _log_uniform(rng, 16, 256))


def _skewed(rng: random.Random, index: int) -> Lengths:
    """Every eighth request is thirty times the others' size: who waits for whom?"""
    return Lengths(1024, 256) if index % 8 == 3 else Lengths(32, 32)


_LENGTHS: dict[str, Callable[[random.Random, int], Lengths]] = {
    "short": lambda rng, index: Lengths(32, 64),
    "mixed": _mixed,
    "skewed": _skewed,
    "staggered": lambda rng, index: Lengths(64, 128),
    "shared-prefix": lambda rng, index: Lengths(32, 64),  # behind the prefix
}
WORKLOADS = tuple(_LENGTHS)


def longest(workloads: tuple[str, ...]) -> int:
    """Positions that the longest request of these workloads can take."""
    sizes = {"mixed": 512 + 256, "skewed": 1024 + 256, "shared-prefix": PREFIX_TOKENS + 32 + 64}
    return max((sizes.get(name, 64 + 128) for name in workloads), default=0)
