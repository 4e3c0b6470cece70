"""Scheduling policy: budget, order, admission, prefix reuse; and random schedules against its promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.scheduler import Scheduler, Sequence


def _run(scheduler: Scheduler, output: int = 99) -> list[tuple[list[int], list[int]]]:
    """One step: commits it and appends a token to each sampling sequence."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step)
    for sequence in step.sampling:
        sequence.tokens.append(output)
    return [(s.tokens, [n]) for s, n in zip(step.sequences, step.counts, strict=True)]


def test_a_long_prompt_is_caught_up_in_chunks_beside_decodes() -> None:
    scheduler = Scheduler(n_slots=2, token_budget=8)
    short, long = Sequence([1, 2]), Sequence(list(range(20)))
    scheduler.add(short)
    scheduler.add(long)
    first = scheduler.schedule()
    assert first is not None
    assert first.counts == (2, 6)
    assert first.sampling == (short,)
    scheduler.commit(first)
    short.tokens.append(5)
    second = scheduler.schedule()
    assert second is not None
    assert (second.sequences, second.counts) == ((short, long), (1, 7))  # the decode first, the rest for the prompt
    scheduler.commit(second)
    short.tokens.append(6)
    third = scheduler.schedule()
    assert third is not None
    assert third.counts == (1, 7)
    assert third.sampling == (short, long)
    assert third.plan.logit_rows.tolist() == [0, 7]


def test_prompts_beside_decodes_are_read_in_smaller_chunks() -> None:
    scheduler = Scheduler(n_slots=3, token_budget=512)
    scheduler.add(Sequence([1, 2]))
    _run(scheduler)
    long, other = Sequence(list(range(1000))), Sequence(list(range(2000, 2100)))
    scheduler.add(long)
    scheduler.add(other)
    step = scheduler.schedule()
    assert step is not None
    assert step.counts == (1, 128)  # one decode, then 128 rows for all prompts together
    scheduler.commit(step)
    scheduler.finish(step.sequences[0])
    alone = scheduler.schedule()
    assert alone is not None
    assert alone.counts == (512,)  # nobody waits for it now


def test_interactive_requests_pass_background_ones() -> None:
    scheduler = Scheduler(n_slots=1, token_budget=4)
    slow, quick = Sequence([1], "background"), Sequence([2])
    scheduler.add(slow)
    scheduler.add(quick)
    step = scheduler.schedule()
    assert step is not None
    assert step.sequences == (quick,)


def test_a_background_request_gives_up_its_slot_and_comes_back() -> None:
    scheduler = Scheduler(n_slots=1, token_budget=8)
    slow = Sequence([1, 2, 3], "background")
    scheduler.add(slow)
    _run(scheduler)
    _run(scheduler)
    quick = Sequence([1, 2, 7])
    scheduler.add(quick)
    step = scheduler.schedule()
    assert step is not None
    assert step.sequences == (quick,)
    assert (slow.slot, quick.num_reused, scheduler.preemptions) == (-1, 2, 1)
    scheduler.commit(step)
    scheduler.finish(quick)
    _run(scheduler)
    assert slow.tokens == [1, 2, 3, 99, 99, 99]  # its own output was computed again, up to the next token
    assert (slow.num_computed, slow.num_reused) == (5, 0)


def test_a_released_slot_is_reused_for_the_longest_shared_prefix() -> None:
    scheduler = Scheduler(n_slots=2, token_budget=64)
    first, second = Sequence([1, 2, 3, 4]), Sequence([1, 2, 9, 9, 9])
    for sequence in (first, second):
        scheduler.add(sequence)
    _run(scheduler)
    slots = {first.slot: first, second.slot: second}
    for sequence in list(slots.values()):
        scheduler.finish(sequence)
    again = Sequence([1, 2, 9, 9, 9])
    scheduler.add(again)
    step = scheduler.schedule()
    assert step is not None
    assert again.num_reused == 4  # all but the last token, whose logits are wanted
    assert slots[again.slot] is second


def test_a_failed_step_leaves_nothing_to_reuse() -> None:
    scheduler = Scheduler(n_slots=1, token_budget=64)
    first = Sequence([1, 2, 3])
    scheduler.add(first)
    _run(scheduler)
    scheduler.finish(first, keep_kv=False)
    again = Sequence([1, 2, 3])
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_reused == 0


def test_a_paused_sequence_keeps_its_slot_and_costs_nothing() -> None:
    scheduler = Scheduler(n_slots=2, token_budget=4)
    sequence = Sequence([1, 2])
    scheduler.add(sequence)
    _run(scheduler)
    sequence.paused = True
    assert scheduler.schedule() is None
    assert sequence.slot >= 0


def test_budget_below_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        Scheduler(n_slots=4, token_budget=3)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_schedules_lose_nobody_and_keep_the_budget(data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(1, 4))
    budget = data.draw(st.integers(n_slots, 12))
    scheduler = Scheduler(n_slots, budget)
    wanted: dict[Sequence, int] = {}  # output tokens still to come
    alive: list[Sequence] = []
    finished = 0
    submitted = data.draw(st.integers(1, 8))
    to_come = submitted
    for _ in range(1000):
        if to_come and (not alive or data.draw(st.booleans())):
            priority = data.draw(st.sampled_from(["interactive", "background"]))
            sequence = Sequence(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=30)), priority)
            wanted[sequence] = data.draw(st.integers(1, 5))
            scheduler.add(sequence)
            alive.append(sequence)
            to_come -= 1
        if alive and data.draw(st.integers(0, 9)) == 0:  # cancel somebody, in whatever state
            victim = data.draw(st.sampled_from(alive))
            scheduler.finish(victim)
            alive.remove(victim)
            finished += 1
        step = scheduler.schedule()
        if step is None:
            assert not alive
            if not to_come:
                break
            continue
        assert sum(step.counts) <= budget
        assert all(n > 0 for n in step.counts)
        assert len({s.slot for s in step.sequences}) == len(step.sequences) <= n_slots
        kinds = {s.priority for s in step.sequences}
        assert len(kinds) == 1  # background work only in steps that nobody else needs
        for sequence in alive:
            if sequence.priority == "interactive" and sequence.slot < 0:  # waits only for its equals
                assert all(s.priority == "interactive" for s in alive if s.slot >= 0)
            if sequence.priority in kinds and sequence.slot >= 0 and sequence.gap == 1:
                assert sequence in step.sequences  # nobody who decodes is ever left out
        before = {s: s.num_computed for s in step.sequences}
        scheduler.commit(step)
        assert all(s.num_computed > before[s] for s in step.sequences)
        for sequence in step.sampling:
            assert sequence.gap == 0
            sequence.tokens.append(0)
            wanted[sequence] -= 1
            if wanted[sequence] == 0:
                scheduler.finish(sequence)
                alive.remove(sequence)
                finished += 1
    assert finished == submitted
    assert scheduler.waiting == scheduler.running == 0


# -- prompts that begin alike --------------------------------------------------------------------
def test_prompts_that_begin_alike_are_computed_once() -> None:
    scheduler = Scheduler(n_slots=3, token_budget=64, min_shared=8)
    shared = list(range(100))
    first, second, third = (Sequence([*shared, 1000 + i, 2000]) for i in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    _run(scheduler)
    assert (first.num_computed, second.num_computed) == (64, 0)
    scheduler.schedule()
    assert second.num_computed == third.num_computed == 64  # copied while the first goes on
    copies = scheduler.take_copies()
    assert [(c.source, c.target, c.start, c.stop) for c in copies] == [
        (first.slot, second.slot, 0, 64),
        (first.slot, third.slot, 0, 64),
    ]
    _run(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert step.counts == (1, 2, 2)
    assert second.num_reused == third.num_reused == 100


def test_followers_of_a_cancelled_leader_take_what_there_is_and_one_leads_on() -> None:
    scheduler = Scheduler(n_slots=3, token_budget=10, min_shared=8)
    first, second, third = (Sequence([*range(100), i]) for i in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    _run(scheduler)
    slot = first.slot
    scheduler.finish(first)
    assert [(c.source, c.stop) for c in scheduler.take_copies()] == [(slot, 10), (slot, 10)]
    assert (second.leader, third.leader) == (None, second)
    step = scheduler.schedule()
    assert step is not None
    assert step.sequences == (second,)


def test_followers_of_a_failed_leader_take_nothing() -> None:
    scheduler = Scheduler(n_slots=2, token_budget=10, min_shared=8)
    first, second = (Sequence([*range(100), i]) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    _run(scheduler)
    scheduler.finish(first, keep_kv=False)
    assert scheduler.take_copies() == []
    assert second.num_computed == 0


def test_nobody_waits_for_a_leader_that_may_stand_still() -> None:
    scheduler = Scheduler(n_slots=3, token_budget=10, min_shared=8)
    background, reader, late = Sequence([*range(50)], "background"), Sequence([*range(50)]), Sequence([*range(50)])
    for sequence in (background, reader):
        scheduler.add(sequence)
    _run(scheduler)
    assert reader.leader is None
    scheduler.add(late)
    scheduler.schedule()
    assert late.leader is reader
    reader.paused = True
    scheduler.schedule()
    assert late.leader is None


def test_a_loading_sequence_costs_nothing_until_it_is_there() -> None:
    class Loads:
        def admitted(self, sequence: Sequence) -> None:
            sequence.loading = True

        def leaving(self, sequence: Sequence, *, keep_kv: bool) -> None:
            left.append((sequence.num_computed, keep_kv))

    left: list[tuple[int, bool]] = []
    scheduler = Scheduler(n_slots=1, token_budget=10, events=Loads())
    sequence = Sequence([*range(50)])
    scheduler.add(sequence)
    assert scheduler.schedule() is None
    sequence.reuse(48)
    sequence.loading = False
    step = scheduler.schedule()
    assert step is not None
    assert step.counts == (2,)
    assert sequence.num_reused == 48
    scheduler.commit(step)
    scheduler.finish(sequence)
    assert left == [(50, True)]


class _KV:
    """Which token computed each position of each slot: a slot's content without a model."""

    def __init__(self, n_slots: int) -> None:
        self.slots: list[dict[int, tuple[int, ...]]] = [{} for _ in range(n_slots)]

    def step(self, scheduler: Scheduler) -> list[Sequence] | None:
        step = scheduler.schedule()
        for copy in scheduler.take_copies():
            for pos in range(copy.start, copy.stop):
                self.slots[copy.target][pos] = self.slots[copy.source][pos]
        if step is None:
            return None
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            for pos in range(sequence.num_computed, sequence.num_computed + count):
                held = [self.slots[sequence.slot].get(p) for p in range(pos)]
                assert held == [tuple(sequence.tokens[: p + 1]) for p in range(pos)]  # all it attends to is its own
                self.slots[sequence.slot][pos] = tuple(sequence.tokens[: pos + 1])
        scheduler.commit(step)
        return list(step.sampling)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_schedules_attend_only_to_their_own_prefix(data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(1, 4))
    scheduler = Scheduler(n_slots, data.draw(st.integers(n_slots, 12)), min_shared=data.draw(st.integers(1, 4)))
    kv = _KV(n_slots)
    alive: dict[Sequence, int] = {}
    to_come = data.draw(st.integers(1, 8))
    for _ in range(500):
        if to_come and (not alive or data.draw(st.booleans())):
            shared = data.draw(st.sampled_from(([], [5] * 6, [5] * 12, [6] * 9)))
            tokens = [*shared, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))]
            sequence = Sequence(tokens, data.draw(st.sampled_from(["interactive", "background"])))
            alive[sequence] = data.draw(st.integers(1, 4))
            scheduler.add(sequence)
            to_come -= 1
        if alive and data.draw(st.integers(0, 6)) == 0:
            victim = data.draw(st.sampled_from(list(alive)))
            scheduler.finish(victim, keep_kv=data.draw(st.booleans()))
            del alive[victim]
        for sequence in alive:
            sequence.paused = data.draw(st.integers(0, 9)) == 0
        sampling = kv.step(scheduler)
        if sampling is None:
            assert all(s.paused for s in alive if s.slot >= 0) or not alive
            if not alive and not to_come:
                return
            continue
        for sequence in sampling:
            sequence.tokens.append(0)
            alive[sequence] -= 1
            if alive[sequence] == 0:
                scheduler.finish(sequence)
                del alive[sequence]
    raise AssertionError("somebody was starved")
