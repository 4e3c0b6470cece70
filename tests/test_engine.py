"""The engine on the real CPU session: batched equals alone, every state can be left, one request's trouble is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine import Engine, EngineClosed, QueueFull, Request, RequestError
from m40llm.engine_stats import StepStats
from m40llm.generation import EVENT_LIMIT, Generation, GenerationFailed, PrefillEvent, TokenEvent
from m40llm.plan import StepPlan
from m40llm.sampling import SamplingError
from m40llm.session import StepResult
from tests.tiny_gguf import build_tiny_gguf

CONTEXT = 1024
PROMPTS = ([72, 101, 108, 108, 111], [300, 12, 40], list(range(30, 90)), [65])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=CONTEXT)


@contextmanager
def engine_on(path: Path, **options: Any) -> Iterator[Engine]:
    runtime = RuntimeOptions(device="cpu", threads=1, ctx=CONTEXT, **options)
    with Engine.load(path, runtime) as engine:
        yield engine


def greedy(max_tokens: int | None = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.002)


def intercept(engine: Engine, before: Callable[[StepPlan], None]) -> None:
    """Calls `before` with each plan, on the engine's thread, and then really runs it."""
    session = engine.model.session
    run = session.run

    def wrapped(plan: StepPlan) -> StepResult:
        before(plan)
        return run(plan)

    session.run = wrapped  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[tuple[int, ...]]:
    """Greedy tokens of each prompt, one request at a time, each into an empty cache."""
    found = []
    for prompt in PROMPTS:
        with engine_on(tiny) as engine:
            found.append(engine.submit(prompt, greedy()).result.token_ids)
    return found


@pytest.mark.parametrize(("slots", "budget"), [(4, 512), (2, 16), (3, 7)])
def test_batched_and_chunked_equal_alone(tiny: Path, alone: list[tuple[int, ...]], slots: int, budget: int) -> None:
    with engine_on(tiny, slots=slots, token_budget=budget) as engine:
        generations = engine.submit_all([Request(prompt, greedy()) for prompt in PROMPTS])
        assert [g.result.token_ids for g in generations] == alone
        again = engine.submit(PROMPTS[2], greedy())  # from what a slot still holds
        assert (again.result.token_ids, again.result.cached_tokens) == (alone[2], len(PROMPTS[2]) - 1)


def test_a_preempted_background_request_says_what_it_would_have_said(tiny: Path, alone: list[tuple[int, ...]]) -> None:
    with engine_on(tiny) as engine:
        slow = engine.submit(PROMPTS[0], greedy(), priority="background")
        next(event for event in slow if isinstance(event, TokenEvent))
        quick = engine.submit(PROMPTS[1], greedy())
        assert quick.result.token_ids == alone[1]
        assert slow.result.token_ids == alone[0]
        assert engine.stats().preemptions <= 1  # 0 when it was through before


def test_events_add_up_to_the_result(tiny: Path) -> None:
    with engine_on(tiny, token_budget=16) as engine:
        generation = engine.submit(PROMPTS[2], greedy(12, logprobs=3))
        events = list(generation)
        result = generation.result
        tokens = [e for e in events if isinstance(e, TokenEvent)]
        assert [e.done for e in events if isinstance(e, PrefillEvent)] == [16, 32, 48, 60]
        assert "".join(e.text for e in tokens) == result.text
        assert tuple(i for e in tokens for i in e.token_ids) == result.token_ids
        assert tuple(p for e in tokens for p in e.logprobs) == result.logprobs
        assert [p.token_id for p in result.logprobs] == list(result.token_ids)
        assert all(p.top[0] == (p.token_id, p.logprob) and len(p.top) == 3 for p in result.logprobs)
        quiet = engine.submit(PROMPTS[2], greedy(12, logprobs=3), stream=False)
        assert (quiet.result.text, quiet.result.token_ids) == (result.text, result.token_ids)
        assert quiet.poll() is None


def test_max_tokens_and_the_end_of_the_context(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        for wanted in (0, 1, 5):
            result = engine.submit(PROMPTS[0], greedy(wanted)).result
            assert (result.generated_tokens, result.finish_reason) == (wanted, "length")
        long = [65] * (CONTEXT - 3)
        result = engine.submit(long, greedy(None)).result
        assert (result.generated_tokens, result.finish_reason) == (3, "length")


def test_a_character_that_the_end_cuts_is_no_text(tiny: Path) -> None:
    first, second = "é".encode()  # the ids of bytes are their values here
    with engine_on(tiny) as engine:
        generation = engine.submit(PROMPTS[0], greedy(1, logit_bias=((first, 1000.0),)))
        assert "".join(e.text for e in generation if isinstance(e, TokenEvent)) == ""
        assert (generation.result.token_ids, generation.result.text) == ((first,), "")
        generation = engine.submit(
            PROMPTS[0], greedy(2, logit_bias=((first, 1000.0), (second, 900.0)), repeat_penalty=1e6)
        )
        assert (generation.result.token_ids, generation.result.text) == ((first, second), "é")


def test_a_stop_string_is_found_across_tokens(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        pieces = [e.text for e in engine.submit(PROMPTS[0], greedy()) if isinstance(e, TokenEvent)]
        text = "".join(pieces)
        at = next(i for i in range(4, 20) if pieces[i] and pieces[i + 1])
        stop = pieces[at][-1] + pieces[at + 1][0]
        generation = engine.submit(PROMPTS[0], greedy(stop=(stop,)))
        assert "".join(e.text for e in generation if isinstance(e, TokenEvent)) == text[: text.index(stop)]
        result = generation.result
        assert (result.finish_reason, result.stop_string) == ("stop", stop)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * CONTEXT, None, f"the prompt has {CONTEXT} tokens.* context .*{CONTEXT}.*--ctx"),
        ([1] * 1000, 25, r"prompt \(1000 tokens\) \+ max_tokens \(25\) exceed the context of 1024; lower max_tokens"),
        ([1, 320], 1, "outside the vocabulary of 320"),
        ([-1], 1, "outside the vocabulary"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    tiny: Path, prompt: list[int], max_tokens: int | None, message: str
) -> None:
    with engine_on(tiny) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, SamplingParams(max_tokens=max_tokens))
        with pytest.raises(SamplingError, match="token 320"):
            engine.submit([1], SamplingParams(logit_bias=((320, 1.0),)))
        assert engine.open_requests == 0
        assert engine.stats().steps == 0


class Gate:
    """Holds the engine's thread before its steps until told, so that a state can be looked at."""

    def __init__(self, engine: Engine, allowed: int = 0) -> None:
        self._permits = threading.Semaphore(allowed)
        self.steps = 0
        self.waits = threading.Event()
        intercept(engine, self._before)

    def _before(self, plan: StepPlan) -> None:
        self.waits.set()
        self._permits.acquire(timeout=20)
        self.waits.clear()
        self.steps += 1

    def allow(self, steps: int) -> None:
        self._permits.release(steps)


def _cancelled_in(engine: Engine, gate: Gate, state: str) -> Generation:
    """A request that was cancelled while it was queued, in prefill, or decoding; the gate is open afterwards."""
    if state == "queued":
        holder = engine.submit([1], greedy(50))
        assert gate.waits.wait(10)
        generation = engine.submit(list(range(64)), greedy())
        generation.cancel()
        gate.allow(1000)
        assert holder.result.finish_reason == "length"
        return generation
    generation = engine.submit(list(range(64)), greedy())
    gate.allow(1 if state == "prefill" else 6)  # 4 chunks of 16 tokens
    eventually(lambda: gate.steps == (1 if state == "prefill" else 6) and gate.waits.is_set())
    assert engine.stats().slots[0].state == ("prefill" if state == "prefill" else "decode")
    generation.cancel()
    gate.allow(1000)
    return generation


@pytest.mark.parametrize(("state", "steps", "kept"), [("queued", 50, 0), ("prefill", 2, 32), ("decode", 7, 66)])
def test_cancel_stops_within_one_step_and_keeps_what_is_computed(tiny: Path, state: str, steps: int, kept: int) -> None:
    with engine_on(tiny, token_budget=16) as engine:
        gate = Gate(engine)
        generation = _cancelled_in(engine, gate, state)
        generation.cancel("shutdown")  # again: the first reason stays
        result = generation.result
        assert (result.finish_reason, result.cancel_reason, generation.state) == ("cancelled", "client", "cancelled")
        assert gate.steps == steps  # the step that was under way, and none after it
        assert (engine.open_requests, engine.stats().active) == (0, 0)
        generation.cancel()
        assert generation.outcome is result
        again = engine.submit(list(range(64)), greedy(1)).result
        assert again.cached_tokens == min(kept, 63)


def test_cancelling_a_finished_request_changes_nothing(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        generation = engine.submit([1], greedy(2))
        before = generation.result
        generation.cancel()
        assert (generation.result, generation.state) == (before, "completed")
    generation.cancel()  # and after the engine is closed
    assert before.cancel_reason is None


def test_a_failing_step_fails_its_requests_and_nothing_else(tiny: Path, alone: list[tuple[int, ...]]) -> None:
    with engine_on(tiny, slots=2) as engine:
        fail = threading.Event()
        fail.set()

        def once(plan: StepPlan) -> None:
            if fail.is_set() and len(plan.slots) == 2:
                fail.clear()
                raise RuntimeError("the device hiccuped")

        intercept(engine, once)
        generations = engine.submit_all([Request(prompt, greedy()) for prompt in PROMPTS])
        for failed in generations[:2]:
            with pytest.raises(GenerationFailed, match="the device hiccuped"):
                _ = failed.result
            assert failed.state == "failed"
        assert [g.result.token_ids for g in generations[2:]] == alone[2:]
        assert engine.stats().failed_steps == 1
        again = engine.submit(PROMPTS[0], greedy()).result
        assert (again.token_ids, again.cached_tokens) == (alone[0], 0)  # what a failed step left is not reused


def test_a_broken_engine_leaves_nobody_waiting(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        first = engine.submit([1], greedy(200))
        next(iter(first))

        def broken() -> None:
            raise RuntimeError("lost count")

        engine._scheduler.schedule = broken  # type: ignore[method-assign]
        with pytest.raises(GenerationFailed, match="lost count"):
            _ = first.result
        eventually(lambda: engine.failure is not None)
        with pytest.raises(EngineClosed, match="lost count"):
            engine.submit([1], greedy())


def test_a_reader_that_lags_is_paused_and_resumed(tiny: Path) -> None:
    with engine_on(tiny, slots=2) as engine:
        slow = engine.submit([1], greedy(600))
        eventually(lambda: slow.lagging)
        assert engine.submit([2], greedy(400), stream=False).result.generated_tokens == 400  # the others go on
        assert EVENT_LIMIT - 1 <= slow.generated <= EVENT_LIMIT + 1
        assert "paused" in [s.state for s in engine.stats().slots]
        text = "".join(e.text for e in slow if isinstance(e, TokenEvent))
        assert (slow.result.generated_tokens, slow.result.text) == (600, text)


def test_a_reader_that_stands_still_is_given_up(tiny: Path) -> None:
    with engine_on(tiny, idle_timeout_s=0.3) as engine:
        slow = engine.submit([1], greedy(600))
        eventually(lambda: slow.lagging)
        began = time.monotonic()
        eventually(lambda: slow.finished)  # nothing else wakes the engine
        assert time.monotonic() - began < 5
        result = slow.outcome
        assert result is not None
        assert (result.finish_reason, result.cancel_reason, engine.stats().active) == ("cancelled", "idle", 0)


def test_a_full_queue_refuses_all_or_nothing(tiny: Path) -> None:
    with engine_on(tiny, slots=2, max_queue=1) as engine:
        gate = Gate(engine)
        two = [Request([1], greedy(2))] * 2
        running = engine.submit_all(two)
        with pytest.raises(QueueFull, match="2 requests are running or waiting, 3 are the limit"):
            engine.submit_all(two)
        assert engine.open_requests == 2
        waiting = engine.submit([1], greedy(2))
        with pytest.raises(QueueFull):
            engine.check_room()
        with pytest.raises(RequestError, match="4 sequences in one request"):
            engine.submit_all(two * 2)
        gate.allow(1000)
        assert all(g.result.finish_reason == "length" for g in [*running, waiting])
        engine.check_room(3)


def test_close_ends_what_runs_and_what_waits(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        generations = engine.submit_all([Request([i], greedy(900)) for i in range(3)])
        next(iter(generations[0]))
        engine.close()
        results = [g.outcome for g in generations]
        assert [r and r.finish_reason for r in results] == ["cancelled"] * 3
        with pytest.raises(EngineClosed):
            engine.submit([1], greedy())
        engine.close()


def test_drain_takes_nothing_new_and_finishes_the_rest(tiny: Path) -> None:
    with engine_on(tiny) as engine:
        generation = engine.submit([1], greedy(50))
        engine.stop_admitting()
        with pytest.raises(EngineClosed, match="shutting down"):
            engine.submit([1], greedy())
        assert generation.result.generated_tokens == 50
        engine.cancel_all()


def test_a_callback_that_fails_cancels_its_own_request_only(tiny: Path) -> None:
    def gone() -> None:
        raise RuntimeError("event loop is closed")

    with engine_on(tiny, slots=2) as engine:
        dropped = engine.submit([1], greedy(900), on_event=gone)
        other = engine.submit([2], greedy(30))
        assert other.result.generated_tokens == 30
        assert dropped.result.finish_reason == "cancelled"


def test_statistics_count_tokens_and_slots(tiny: Path) -> None:
    seen: list[StepStats] = []
    runtime = RuntimeOptions(device="cpu", threads=1, ctx=CONTEXT, slots=2)
    with Engine.load(tiny, runtime, on_step=seen.append) as engine:
        for _ in range(2):
            result = engine.submit(PROMPTS[2], greedy(10)).result
        stats = engine.stats()
        assert result.slot == 0
        assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (61, 59, 20)
        assert stats.steps == 20
        eventually(lambda: len(seen) == 20)  # told after the last result
        assert sum(s.rows for s in seen) == 61 + 18
        assert sum([len(s.token_gaps) for s in seen]) == 18
        assert [s.tokens for s in stats.slots] == [69, 0]  # the last token was never run
        assert stats.kv_bytes_resident == 69 * stats.kv_bytes_per_token
        assert (stats.active, stats.waiting) == (0, 0)
