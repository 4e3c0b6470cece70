"""What an engine has done and is doing: frozen snapshots for logs and metrics, no tensors, no locks to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SlotState = Literal["idle", "prefill", "decode", "paused"]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step that ran. `token_gaps` are seconds since the sequence's token before, one per token after the first."""

    seconds: float
    rows: int  # tokens computed
    prefill_tokens: int
    sampled: int  # sequences that got a token
    token_gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One KV slot. `tokens` positions hold KV: of the running request, or kept for the next one that starts the same."""

    slot: int
    state: SlotState
    tokens: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    background: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and the present. Tokens unless named otherwise."""

    slots: tuple[SlotStats, ...]
    waiting: int  # requests without a slot
    steps: int
    step_seconds: float
    prompt_tokens: int  # computed, without the reused ones
    cached_tokens: int  # prompt tokens that were already in a slot or the cache
    generated_tokens: int
    failed_steps: int
    preemptions: int  # background requests that gave up their slot
    kv_bytes: int  # allocated
    kv_bytes_per_token: int
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return sum(slot.state != "idle" for slot in self.slots)

    @property
    def kv_bytes_resident(self) -> int:
        """Bytes of the KV cache that hold something."""
        return sum(slot.tokens for slot in self.slots) * self.kv_bytes_per_token
