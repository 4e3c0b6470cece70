"""What a run of serve.py measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from serving_interference import Interference
from serving_stats import Summary


@dataclass
class Together:
    """N equal requests at once, one value a round, tokens per second."""

    decode: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    llama_decode: list[float] = field(default_factory=list)
    llama_whole: list[float] = field(default_factory=list)

    def ratio(self, ours: list[float], theirs: list[float]) -> float | None:
        return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None


@dataclass
class Results:
    """Everything that was measured."""

    closed: dict[tuple[str, int], Summary] = field(default_factory=dict)
    opened: dict[tuple[float, float], Summary] = field(default_factory=dict)  # (load, requests per second)
    together: dict[int, Together] = field(default_factory=dict)
    long: Interference | None = None
    server_idle_cpu_s: float = 0.0
    llama_idle_cpu_s: float = 0.0
    client_cpu: float = 0.0  # processors that the clients kept busy while closed loops ran
