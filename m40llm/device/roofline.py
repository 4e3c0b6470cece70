"""How long kernels take on a card that is not here: instructions to issue against bytes to move.

`sm52_costs.json` holds what one warp of each kernel executes on sm_52, counted by walking its machine code
(bench/sm52_model.py writes it), by class of instruction and in two parts: once, and per step of its inner loop. From it and the
throughput of each class come cycles of a multiprocessor; from those and the bytes comes the time

    t = sqrt(issue² + (memory / 0.8)²) + launches × 3 µs.

No card was measured. The form of the model was chosen with eight published llama.cpp figures in view (M40, P40, GTX 1060), which
it gives within -7…+5 %; other settings that give the P40's within 8 % spread over 38…53 tok/s for an M40 figure of 40.8. So
ratios are solid, and absolute figures are good to -25…+30 %: `ERROR`. Occupancy and latencies are not part of it.

Sources: throughputs, CUDA C++ Programming Guide, "Arithmetic Instructions", compute capability 5.x; launches of 3 µs and 0.8 of
the peak bandwidth, the fit above.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m40llm.device.errors import DeviceError
from m40llm.device.sources import KERNEL_DIR, digest, headers, include_dirs, kernel_source

COSTS_FILE = Path(__file__).resolve().parent / "data" / "sm52_costs.json"
ERROR = (-0.25, 0.30)  # of a predicted speed
ERROR_NOTE = "predicted, not measured: ratios are solid, absolute figures good to -25/+30 %"
ACHIEVED_BANDWIDTH = 0.8  # of the peak
LAUNCH_S = 3e-6


@dataclass(frozen=True, slots=True)
class Card:
    """Multiprocessors of 128 lanes at `clock_hz`, `bandwidth` bytes/s (ECC off), `memory` bytes."""

    name: str
    multiprocessors: int
    clock_hz: float
    bandwidth: float
    memory: int


CARDS = {
    "m40-24g": Card("Tesla M40 24GB", 24, 1.114e9, 288e9, 24 << 30),
    "m40-12g": Card("Tesla M40 12GB", 24, 1.114e9, 288e9, 12 << 30),
    "p40": Card("Tesla P40 24GB", 30, 1.531e9, 347e9, 24 << 30),
}


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of one multiprocessor by what is busy: schedulers, arithmetic lanes, conversions, shared memory, load units."""

    issue: float = 0.0
    arithmetic: float = 0.0
    special: float = 0.0
    shared: float = 0.0
    load: float = 0.0

    @property
    def busiest(self) -> float:
        return max(self.issue, self.arithmetic, self.special, self.shared, self.load)

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.issue + other.issue,
            self.arithmetic + other.arithmetic,
            self.special + other.special,
            self.shared + other.shared,
            self.load + other.load,
        )

    def __mul__(self, times: float) -> Cycles:
        return Cycles(
            self.issue * times, self.arithmetic * times, self.special * times, self.shared * times, self.load * times
        )


# Cycles of one warp instruction of each class, next to its slot in one of four schedulers. Lanes per cycle: 128 (full), 64
# (half), 32 (special functions, conversions, shuffles). Shared memory serves 128 bytes a cycle, so a warp's 64- and 128-bit
# access takes two and four; a load unit splits a warp into requests of 8, 4 or 2 threads (32, 64, 128 bits), two a cycle.
_SCHEDULERS = 4
CLASSES = {
    "full": Cycles(0.25, 0.25),
    "half": Cycles(0.25, 0.5),
    "special": Cycles(0.25, special=1.0),
    "shuffle": Cycles(0.25, shared=1.0),
    "shared32": Cycles(0.25, shared=1.0),
    "shared64": Cycles(0.25, shared=2.0),
    "shared128": Cycles(0.25, shared=4.0),
    "memory32": Cycles(0.25, load=2.0),
    "memory64": Cycles(0.25, load=4.0),
    "memory128": Cycles(0.25, load=8.0),
    "control": Cycles(0.25),
}


def cycles_of(counts: Mapping[str, float]) -> Cycles:
    """Of `counts` warp instructions by class on one multiprocessor."""
    total = Cycles()
    for name, count in counts.items():
        total += CLASSES[name] * count
    return total


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel on sm_52. `once` and `per_step` are warp instructions by class, of one warp; `step` says of what."""

    module: str
    step: str
    registers: int
    shared_bytes: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    once: Mapping[str, float]
    per_step: Mapping[str, float]

    def warp(self, steps: float) -> Cycles:
        """Of one warp that takes `steps` steps."""
        return cycles_of(self.once) + cycles_of(self.per_step) * steps


@dataclass(frozen=True, slots=True)
class Work:
    """What launches take: cycles of all multiprocessors together, by unit and (`busy`) by each launch's busiest, DRAM bytes."""

    cycles: Cycles
    busy: float
    nbytes: float
    launches: int

    @classmethod
    def of_launch(cls, cycles: Cycles, nbytes: float) -> Work:
        return cls(cycles, cycles.busiest, nbytes, 1)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.cycles + other.cycles,
            self.busy + other.busy,
            self.nbytes + other.nbytes,
            self.launches + other.launches,
        )


NO_WORK = Work(Cycles(), 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds on a card: instructions alone, bytes at the peak bandwidth alone, launches alone, and the model's sum."""

    issue: float
    memory: float
    launches: float
    total: float


def time_on(card: Card, work: Work) -> Time:
    """The model's time for `work`. `issue` takes the busiest unit of each launch, be it the schedulers or another."""
    issue = work.busy / (card.multiprocessors * card.clock_hz)
    memory = work.nbytes / card.bandwidth
    launches = work.launches * LAUNCH_S
    return Time(issue, memory, launches, math.hypot(issue, memory / ACHIEVED_BANDWIDTH) + launches)


# ---- the table -----------------------------------------------------------------------------------------------------------


@functools.cache
def load_costs(path: Path = COSTS_FILE) -> dict[str, KernelCost]:
    """Cost of every kernel in the table, by symbol. Raises DeviceError for a table that cannot be read."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {symbol: KernelCost(**entry) for symbol, entry in table["kernels"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"{path} is not a table of kernel costs ({error}); bench/sm52_model.py --write makes it"
        ) from None


def stale_modules(path: Path = COSTS_FILE, kernel_dir: Path = KERNEL_DIR) -> list[str]:
    """Modules whose sources are not those that the table was made from."""
    recorded: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["sources"]
    return sorted(module for module, made_from in recorded.items() if source_digest(module, kernel_dir) != made_from)


def source_digest(module: str, kernel_dir: Path = KERNEL_DIR) -> str:
    """Of a module's source and the headers that it includes, without comments and white space."""
    known = {path.name: path for path in headers(include_dirs(kernel_dir))}
    wanted, seen = [kernel_source(module, kernel_dir)], []
    while wanted:
        path = wanted.pop()
        seen.append(path)
        for name in re.findall(r'#include "(\w+\.cuh)"', path.read_text(encoding="utf-8")):
            if known[name] not in (*seen, *wanted):
                wanted.append(known[name])
    return digest(*(_code(path.read_text(encoding="utf-8")) for path in sorted(seen, key=lambda p: p.name)))


def _code(text: str) -> str:
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())


def to_json(sources: Mapping[str, str], costs: Mapping[str, KernelCost], note: Mapping[str, str]) -> str:
    """The table's text. `sources`: digest of every module; `note`: how it was made."""
    kernels = {
        symbol: {
            **{name: getattr(cost, name) for name in KernelCost.__slots__ if name not in ("once", "per_step")},
            "once": _rounded(cost.once),
            "per_step": _rounded(cost.per_step),
        }
        for symbol, cost in sorted(costs.items())
    }
    return (
        json.dumps({"note": dict(note), "sources": dict(sorted(sources.items())), "kernels": kernels}, indent=1) + "\n"
    )


def _rounded(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(count, 2) for name, count in sorted(counts.items()) if count}


def total(parts: Iterable[Work]) -> Work:
    """The sum; launches add up too."""
    result = NO_WORK
    for part in parts:
        result += part
    return result
