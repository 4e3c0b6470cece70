"""Which tokens of which sequences run in the next step: a token budget spent on gaps, no phases, no tensors.

A sequence has `tokens` (prompt and output so far) and `num_computed` of them in the KV cache. Each step spends the budget
on the differences: a decoding sequence has a gap of one, a prompt is caught up in chunks. One prompt on the command line
is a schedule of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, Protocol

from m40llm.plan import Segment, StepPlan

Priority = Literal["interactive", "background"]

# A prompt waits for an earlier one that is computing the same beginning if that is at least so long: the earlier one has its
# turn first anyway, and a copy costs a hundredth of the computation. Short beginnings are not worth the step of delay.
MIN_SHARED = 64

# Who decodes waits for the whole step, so prompts beside decodes are read in smaller chunks: a quarter of the default budget
# costs prefill a few per cent (weights are read more often) and shortens the longest gap between two tokens by as much.
PROMPT_ROWS_BESIDE_DECODES = 128
# Positions copied between slots before one step: for all sequences together a few milliseconds.
_COPY_TOKENS = 2048


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far they are computed. `slot` is -1 while it waits."""

    tokens: list[int]
    priority: Priority = "interactive"
    slot: int = -1
    num_computed: int = 0
    num_reused: int = 0  # prompt tokens that others had computed by the first admission
    paused: bool = False  # the reader has fallen behind: keep the slot, spend no budget
    loading: bool = False  # KV is on its way into the slot
    leader: Sequence | None = None  # computes the first `shared` tokens for both
    shared: int = 0
    admissions: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prompt_tokens

    def reuse(self, stop: int) -> None:
        """The slot holds the first `stop` tokens, and nothing had to be computed for it."""
        self.num_computed = stop
        if self.admissions == 1:
            self.num_reused = stop


@dataclass(frozen=True, slots=True)
class KVCopy:
    """Positions `start .. stop` of slot `source` are to be copied to slot `target` before anything else runs."""

    source: int
    target: int
    start: int
    stop: int


class SlotEvents(Protocol):
    """Who wants to know when slots change hands; the calls come before any step that uses the slot."""

    def admitted(self, sequence: Sequence) -> None:
        """It has a slot, with `num_computed` tokens in it. May set `loading`, and clear it later with what it loaded."""

    def leaving(self, sequence: Sequence, *, keep_kv: bool) -> None:
        """It is about to lose its slot; without `keep_kv` the slot's content is worthless."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, the sequences in its segments, and those whose next token it yields (one per logit row)."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]  # tokens that the step computes of each sequence
    sampling: tuple[Sequence, ...]


class SlotPool:
    """KV slots. A free slot remembers the tokens whose KV it still holds, so that a prompt sharing them skips their prefill."""

    def __init__(self, n_slots: int) -> None:
        self._resident: list[list[int]] = [[] for _ in range(n_slots)]
        self._free = list(range(n_slots))  # least recently released first

    def __len__(self) -> int:
        return len(self._free)

    def acquire(self, tokens: SequenceOf[int]) -> tuple[int, int]:
        """A free slot and how many leading tokens it already holds; at least the last token is left to compute.

        Raises:
            IndexError: no slot is free.
        """
        shared = {slot: _common_prefix(self._resident[slot], tokens) for slot in self._free}
        slot = max(self._free, key=lambda s: shared[s])
        if shared[slot] == 0:  # nothing to reuse: overwrite an empty slot, else the one released longest ago
            slot = next((s for s in self._free if not self._resident[s]), self._free[0])
        self._free.remove(slot)
        return slot, min(shared[slot], len(tokens) - 1)

    def release(self, slot: int, resident: SequenceOf[int]) -> None:
        """Gives a slot back; its first `len(resident)` positions hold the KV of those tokens."""
        self._resident[slot] = list(resident)
        self._free.append(slot)

    def resident(self, slot: int) -> int:
        """Positions of a free slot that hold KV."""
        return len(self._resident[slot])


def _common_prefix(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


class Scheduler:
    """First come, first served among equals; decodes before prefills; background work only where nothing interactive waits.

    A background sequence runs in steps that no interactive one needs, and gives up its slot to an interactive one that finds
    none free; it goes on later from what is still in a slot.

    Args:
        n_slots: sequences in flight at once.
        token_budget: rows of a step; at least `n_slots`, so that every decode fits.
        events: told of slots that change hands.
        min_shared: tokens that two prompts must share for the later one to wait for the earlier one's.
    """

    def __init__(
        self, n_slots: int, token_budget: int, *, events: SlotEvents | None = None, min_shared: int = MIN_SHARED
    ) -> None:
        if token_budget < n_slots:
            raise ValueError(f"a budget of {token_budget} rows cannot serve {n_slots} decoding slots")
        self.token_budget = token_budget
        self._events = events
        self._min_shared = min_shared
        self._copies: list[KVCopy] = []
        self._slots = SlotPool(n_slots)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # by admission
        self.preemptions = 0

    @property
    def slots(self) -> SlotPool:
        return self._slots

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind its equals."""
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence, *, keep_kv: bool = True) -> None:
        """Removes a sequence in any state; `keep_kv` False forgets what its slot holds (a step failed half way)."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave_slot(sequence, keep_kv=keep_kv)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run. In both cases `take_copies` may have work to do first."""
        self._admit()
        self._follow_leaders()
        budget = self.token_budget
        chosen: list[tuple[Sequence, int]] = []
        for sequence in self._by_urgency():
            if chosen and chosen[-1][0].gap == 1 != sequence.gap:  # the first prompt behind the decodes
                budget = min(budget, PROMPT_ROWS_BESIDE_DECODES)
            count = min(sequence.gap, budget)
            if count > 0:
                chosen.append((sequence, count))
                budget -= count
        if not chosen:
            return None
        segments = []
        sampling = []
        for sequence, count in chosen:
            start = sequence.num_computed
            yields_token = count == sequence.gap
            segments.append(
                Segment(
                    sequence.slot, start, sequence.tokens[start : start + count], (count - 1,) if yields_token else ()
                )
            )
            if yields_token:
                sampling.append(sequence)
        return ScheduledStep(
            StepPlan.pack(segments), tuple(s for s, _ in chosen), tuple(n for _, n in chosen), tuple(sampling)
        )

    def take_copies(self) -> list[KVCopy]:
        """Copies that are due, in order; the caller makes them before it runs a step or moves other KV."""
        copies, self._copies = self._copies, []
        return copies

    def commit(self, step: ScheduledStep) -> None:
        """Records that the step ran: its tokens are in the KV cache. The caller appends what it sampled."""
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            sequence.num_computed += count

    def _admit(self) -> None:
        for sequence in _interactive_first(self._waiting):
            if not len(self._slots) and not self._preempt_for(sequence):
                return
            self._waiting.remove(sequence)
            sequence.slot, sequence.num_computed = self._slots.acquire(sequence.tokens)
            sequence.admissions += 1
            sequence.reuse(sequence.num_computed)
            self._find_leader(sequence)
            self._running.append(sequence)
            if self._events is not None:
                self._events.admitted(sequence)

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Takes the slot of the youngest background sequence for an interactive one; False when there is none to take."""
        victim = next((s for s in reversed(self._running) if s.priority == "background"), None)
        if sequence.priority == "background" or victim is None:
            return False
        self._leave_slot(victim, keep_kv=True)
        victim.num_computed = 0
        self._waiting.insert(0, victim)
        self.preemptions += 1
        return True

    def _leave_slot(self, sequence: Sequence, *, keep_kv: bool) -> None:
        self._running.remove(sequence)
        self._release_followers(sequence, keep_kv=keep_kv)
        if self._events is not None:
            self._events.leaving(sequence, keep_kv=keep_kv)
        self._slots.release(sequence.slot, sequence.tokens[: sequence.num_computed] if keep_kv else ())
        sequence.slot = -1
        sequence.loading = False
        sequence.leader = None

    # -- prompts that begin alike --------------------------------------------------------------------
    def _find_leader(self, sequence: Sequence) -> None:
        """Among those admitted before, the one that shares most with it, if that is worth waiting for."""
        most = sequence.num_computed + self._min_shared - 1
        for other in self._running:
            if other is sequence:
                return
            if other.paused or (other.priority == "background" and sequence.priority != "background"):
                continue  # it may stand still
            shared = min(_common_prefix(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
            if shared > most:
                sequence.leader, sequence.shared, most = other, shared, shared

    def _follow_leaders(self) -> None:
        """Copies what leaders have computed since the last step; a follower that has all it shares goes on by itself."""
        left = _COPY_TOKENS
        for sequence in self._running:
            leader = sequence.leader
            if leader is None or sequence.loading:
                continue
            left -= self._copy_from(leader, sequence, left)
            if sequence.num_computed >= sequence.shared or leader.paused:
                sequence.leader = None

    def _release_followers(self, leader: Sequence, *, keep_kv: bool) -> None:
        """The leader's slot will be reused: followers take what there is and look for another leader."""
        for sequence in self._running:
            if sequence.leader is leader:
                if keep_kv and not sequence.loading:
                    self._copy_from(leader, sequence, len(leader.tokens))
                sequence.leader = None
                self._find_leader(sequence)

    def _copy_from(self, leader: Sequence, sequence: Sequence, limit: int) -> int:
        start = sequence.num_computed
        count = min(sequence.shared, leader.num_computed) - start
        count = min(count, limit)
        if count <= 0:
            return 0
        self._copies.append(KVCopy(leader.slot, sequence.slot, start, start + count))
        sequence.reuse(start + count)
        return count

    def _by_urgency(self) -> Iterator[Sequence]:
        active = [s for s in self._running if not s.paused and not s.loading and s.leader is None]
        interactive = [s for s in active if s.priority == "interactive"]
        active = interactive or active
        # A preempted sequence recomputes its output too: by the gap it is a prefill, whatever it has sampled.
        yield from (s for s in active if s.gap == 1)
        yield from (s for s in active if s.gap != 1)


def _interactive_first(sequences: list[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda s: s.priority != "interactive")  # stable: first come, first served
