"""Engine: owns the thread that owns the device. Handlers submit and read; the thread schedules, runs, commits, posts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from os import PathLike
from types import TracebackType
from typing import NamedTuple

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine_stats import EngineStats, SlotStats, StepStats
from m40llm.generation import CancelReason, FinishReason, Generation
from m40llm.model import Model, OnCompile
from m40llm.sampling import Constraint, token_logprobs
from m40llm.scheduler import Priority, ScheduledStep, Scheduler, Sequence
from m40llm.session import StepResult
from m40llm.weights import LoadProgress

OnStep = Callable[[StepStats], None]


class RequestError(ValueError):
    """A request that cannot run; the message names the problem and the remedy. Nothing was computed for it."""


class EngineClosed(RuntimeError):
    """The engine is shutting down, or broke, and takes no more requests."""


class QueueFull(RuntimeError):
    """As many requests wait as may. Nothing of this one was taken; it may be tried again later."""


class Request(NamedTuple):
    """What `submit_all` takes several of: token ids of the prompt, and how to continue it.

    `constraint` restricts the output's tokens and is this request's own; `written` are control tokens that the text shows.
    """

    prompt_ids: SequenceOf[int]
    params: SamplingParams
    constraint: Constraint | None = None
    written: frozenset[int] = frozenset()


class _Totals:
    """Counters that only the engine's thread changes; a reader may see them one step apart."""

    __slots__ = ("cached_tokens", "failed_steps", "generated_tokens", "prompt_tokens", "step_seconds", "steps")

    def __init__(self) -> None:
        self.steps = self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.failed_steps = 0
        self.step_seconds = 0.0


class Engine:
    """Continuous batching over one `Model`. Use as a context manager; `close` cancels what is in flight.

    `submit` may be called from any thread.

    Args:
        token_budget: rows of a step.
        max_queue: requests that may wait for a slot (None: any number).
        idle_timeout_s: a stream whose reader stands still this long, full to its limit, is cancelled (None: never).
        on_step: called on the engine's thread after each step; must return quickly.
    """

    def __init__(
        self,
        model: Model,
        token_budget: int,
        *,
        max_queue: int | None = None,
        idle_timeout_s: float | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.model = model
        self.max_queue = max_queue
        self._idle_timeout = idle_timeout_s
        self._on_step = on_step
        self._n_slots = model.session.kv_layout.n_slots
        self._scheduler = Scheduler(self._n_slots, token_budget)
        self._live: dict[Sequence, Generation] = {}  # the thread's own
        self._totals = _Totals()
        self._inbox: deque[Generation] = deque()
        self._open = 0  # submitted and not ended
        self._wake = threading.Condition()
        self._nudged = False
        self._draining = False
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="m40llm-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        options: RuntimeOptions,
        *,
        progress: LoadProgress | None = None,
        on_compile: OnCompile | None = None,
        on_step: OnStep | None = None,
    ) -> Engine:
        """Opens the model (see `Model.open` for what can be wrong with it) and starts the thread."""
        model = Model.open(path, options, progress=progress, on_compile=on_compile)
        return cls(
            model,
            options.token_budget,
            max_queue=options.max_queue,
            idle_timeout_s=options.idle_timeout_s,
            on_step=on_step,
        )

    @property
    def context(self) -> int:
        """Positions per slot."""
        return self.model.session.kv_layout.context

    @property
    def open_requests(self) -> int:
        """Requests that were submitted and have not ended."""
        return self._open

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine itself, if anything did: it takes no more requests then."""
        return self._failure

    def submit(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: Priority = "interactive",
        on_event: Callable[[], None] | None = None,
        stream: bool = True,
    ) -> Generation:
        """Queues a request and returns at once.

        Args:
            on_event: called on the engine's thread after each event and at the end; must return quickly.
            stream: False queues no events: `on_event` tells of the end only, and the result holds everything.

        Raises:
            RequestError: the prompt is empty, or prompt and `max_tokens` do not fit a slot's context.
            SamplingError: the logit bias names a token outside the vocabulary.
            QueueFull: `max_queue` requests wait already.
            EngineClosed: after `stop_admitting` or `close`.
        """
        return self.submit_all(
            [Request(prompt_ids, params)], priority=priority, on_events=on_event and [on_event], stream=stream
        )[0]

    def submit_all(
        self,
        requests: SequenceOf[Request],
        *,
        priority: Priority = "interactive",
        on_events: SequenceOf[Callable[[], None]] | None = None,
        stream: bool = True,
    ) -> list[Generation]:
        """Queues all of several requests or none; `on_events` has one callback for each. Otherwise as `submit`."""
        vocab_size = self.model.config.vocab_size
        generations = [
            Generation(
                list(request.prompt_ids),
                request.params,
                self.model.tokenizer,
                vocab_size,
                self._max_tokens(request, vocab_size),
                priority,
                self._nudge,
                on_events[i] if on_events else None,
                stream,
                request.constraint,
                request.written,
            )
            for i, request in enumerate(requests)
        ]
        with self._wake:
            if self._failure is not None:
                raise EngineClosed(f"the engine has failed: {self._failure}; restart it")
            if self._draining or self._closing:
                raise EngineClosed("the engine is shutting down")
            self._check_room(len(generations))
            self._open += len(generations)
            for generation in generations:
                generation.queued()
            self._inbox.extend(generations)
            self._wake.notify()
        return generations

    def check_room(self, count: int = 1) -> None:
        """Raises QueueFull if `count` requests would not be taken now, and RequestError if they never would."""
        with self._wake:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        if self.max_queue is None:
            return
        limit = self._n_slots + self.max_queue
        if count > limit:
            raise RequestError(
                f"{count} sequences in one request are more than {self._n_slots} slots and {self.max_queue} places in the "
                "queue; ask for fewer or raise --max-queue"
            )
        if self._open + count > limit:
            raise QueueFull(
                f"{self._open} requests are running or waiting, {limit} are the limit (--slots plus --max-queue); try again later"
            )

    def _max_tokens(self, request: Request, vocab_size: int) -> int:
        prompt_ids, params = request.prompt_ids, request.params
        if request.constraint is not None and params.ignore_eos:
            raise RequestError("ignore_eos cannot be combined with constrained output, which ends when it is complete")
        n = len(prompt_ids)
        if n == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            raise RequestError(f"the prompt has a token id outside the vocabulary of {vocab_size}")
        room = self.context - n
        if room < 1:
            raise RequestError(
                f"the prompt has {n} tokens, but the context of {self.context} must also have room for an answer; "
                "shorten the prompt or raise --ctx"
            )
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"prompt ({n} tokens) + max_tokens ({params.max_tokens}) exceed the context of {self.context}; "
                "lower max_tokens or raise --ctx"
            )
        return params.max_tokens

    def stats(self) -> EngineStats:
        """A snapshot; callable from any thread, cheap enough for every scrape."""
        totals, layout = self._totals, self.model.session.kv_layout
        by_slot = {sequence.slot: (sequence, generation) for sequence, generation in list(self._live.items())}
        slots = []
        for slot in range(self._n_slots):
            sequence, generation = by_slot.get(slot, (None, None))
            if sequence is None or generation is None:
                slots.append(SlotStats(slot, "idle", self._scheduler.slots.resident(slot)))
                continue
            state = "paused" if sequence.paused else "decode" if sequence.decoding else "prefill"
            background = sequence.priority == "background"
            counts = (sequence.num_computed, sequence.prompt_tokens, generation.generated)
            slots.append(SlotStats(slot, state, *counts, background))  # type: ignore[arg-type]
        return EngineStats(
            slots=tuple(slots),
            waiting=max(0, self._open - sum(s.state != "idle" for s in slots)),
            steps=totals.steps,
            step_seconds=totals.step_seconds,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            failed_steps=totals.failed_steps,
            preemptions=self._scheduler.preemptions,
            kv_bytes=layout.nbytes,
            kv_bytes_per_token=layout.bytes_per_token,
        )

    def stop_admitting(self) -> None:
        """From now on `submit` raises EngineClosed; what was taken goes on."""
        with self._wake:
            self._draining = True

    def cancel_all(self, reason: CancelReason = "shutdown") -> None:
        """Cancels whatever is running or waiting, within one step; returns at once."""
        with self._wake:
            waiting = list(self._inbox)
        for generation in [*waiting, *list(self._live.values())]:
            generation.cancel(reason)

    def close(self) -> None:
        """Cancels what is in flight, ends the thread, releases the model; may be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _nudge(self) -> None:
        with self._wake:
            self._nudged = True
            self._wake.notify()

    # -- the thread --------------------------------------------------------------------------------
    def _loop(self) -> None:
        try:
            while self._take_orders():
                step = self._scheduler.schedule()
                if step is None:
                    self._idle()
                else:
                    self._run(step)
        except Exception as error:  # not a step's fault but the engine's own: nobody may wait for an answer for ever
            with self._wake:
                self._failure = error
            self._end_all(error)
            return
        self._end_all(None)

    def _end_all(self, error: Exception | None) -> None:
        with self._wake:
            arrived = list(self._inbox)
            self._inbox.clear()
        for generation in arrived:
            self._live[generation.sequence] = generation
        for sequence, generation in list(self._live.items()):
            generation.cancel("shutdown")
            self._end(sequence, "error" if error else "cancelled", error)

    def _take_orders(self) -> bool:
        """Admits, cancels and pauses; False when it is time to leave."""
        with self._wake:
            arrived = list(self._inbox)
            self._inbox.clear()
            self._nudged = False
            closing = self._closing
        for generation in arrived:
            self._live[generation.sequence] = generation
            if generation.max_tokens == 0:
                self._end(generation.sequence, "length")
            else:
                self._scheduler.add(generation.sequence)
        now = time.monotonic()
        for sequence, generation in list(self._live.items()):
            if generation.cancelled:
                self._end(sequence, "cancelled")
                continue
            sequence.paused = generation.lagging
            if not sequence.paused:
                generation.lagging_since = None
            elif generation.lagging_since is None:
                generation.lagging_since = now
            elif self._idle_timeout is not None and now - generation.lagging_since >= self._idle_timeout:
                generation.cancel("idle")
                self._end(sequence, "cancelled")
        return not closing

    def _idle(self) -> None:
        """Sleeps until there is something to do, at the latest until a reader that stands still has had its time."""
        since = [g.lagging_since for g in self._live.values() if g.lagging_since is not None]
        timeout = None
        if since and self._idle_timeout is not None:
            timeout = max(0.0, min(since) + self._idle_timeout - time.monotonic())
        with self._wake:
            if not (self._inbox or self._nudged or self._closing):
                self._wake.wait(timeout)

    def _run(self, step: ScheduledStep) -> None:
        began = time.perf_counter()
        prefill = sum(
            n for s, n in zip(step.sequences, step.counts, strict=True) if n > 1 or not s.decoding
        )  # before the commit moves them on
        for sequence in step.sequences:
            generation = self._live[sequence]
            if generation.state == "queued":
                self._totals.cached_tokens += sequence.num_reused
            generation.started()
        try:
            result = self.model.session.run(step.plan)
            gaps = self._commit(step, result)
        except Exception as error:  # contained: the step's requests fail, the process and the others go on
            self._totals.failed_steps += 1
            for sequence in step.sequences:
                self._end(sequence, "error", error)
            return
        seconds = time.perf_counter() - began
        totals = self._totals
        totals.steps += 1
        totals.step_seconds += seconds
        totals.prompt_tokens += prefill
        totals.generated_tokens += len(step.sampling)
        if self._on_step is not None:
            self._on_step(StepStats(seconds, sum(step.counts), prefill, len(step.sampling), tuple(gaps)))

    def _commit(self, step: ScheduledStep, result: StepResult) -> list[float]:
        """Takes a step's outcome; answers the seconds that each token came after the one before it."""
        prompts = [s for s in step.sequences if not s.decoding]
        self._scheduler.commit(step)
        for sequence in prompts:
            self._live[sequence].prefilled()
        gaps = []
        for row, sequence in enumerate(step.sampling):
            generation = self._live[sequence]
            try:
                reason = self._sample(generation, result, row)
            except Exception as error:
                self._end(sequence, "error", error)
                continue
            if generation.token_gap is not None:
                gaps.append(generation.token_gap)
            if reason is not None:
                self._end(sequence, reason)
        return gaps

    def _sample(self, generation: Generation, result: StepResult, row: int) -> FinishReason | None:
        token_id = (
            generation.sampler.sample(result.logits[row]) if generation.sampler.needs_logits else int(result.ids[row])
        )
        top = generation.params.logprobs
        return generation.accept(token_id, None if top is None else token_logprobs(result.logits[row], token_id, top))

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        generation = self._live.pop(sequence, None)
        if generation is None:  # ended before, in the same step
            return
        self._scheduler.finish(sequence, keep_kv=error is None)
        with self._wake:
            self._open -= 1
        generation.finish(reason, error)
