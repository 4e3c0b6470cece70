"""Engine: owns the thread that owns the device. Handlers submit and read; the thread schedules, runs, commits, posts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from os import PathLike
from types import TracebackType

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine_cache import EngineCache, open_cache
from m40llm.engine_inbox import Inbox
from m40llm.engine_stats import EngineStats, SlotStats, StepStats
from m40llm.generation import CancelReason, FinishReason, Generation
from m40llm.kv.prefix_cache import PrefixCache
from m40llm.model import Model, OnCompile
from m40llm.request import (
    EngineClosed,
    QueueFull,
    Request,
    RequestError,
    checked_cache_id,
    checked_max_tokens,
    warm_request,
)
from m40llm.sampling import token_logprobs
from m40llm.scheduler import Priority, ScheduledStep, Scheduler, Sequence
from m40llm.session import StepResult
from m40llm.weights import LoadProgress

__all__ = ["Engine", "EngineClosed", "OnStep", "QueueFull", "Request", "RequestError"]

OnStep = Callable[[StepStats], None]


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
        cache: KV of past prompts beside the slots; the engine's to close.
    """

    def __init__(
        self,
        model: Model,
        token_budget: int,
        *,
        cache: PrefixCache | None = None,
        max_queue: int | None = None,
        idle_timeout_s: float | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.model = model
        self._idle_timeout = idle_timeout_s
        self._on_step = on_step
        self._n_slots = model.session.kv_layout.n_slots
        self.cache = cache
        self._inbox = Inbox(self._n_slots, max_queue)
        self._kv = EngineCache(cache, model.session, self._inbox.nudge)
        self._scheduler = self._kv.scheduler = Scheduler(self._n_slots, token_budget, events=self._kv)
        self._live: dict[Sequence, Generation] = {}  # the thread's own
        self._unsaved: list[Future[None]] = []  # the thread's own: answered by `_kv.settle`
        self._totals = _Totals()
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
        warm_up: bool = False,
        before_warm_up_step: Callable[[], None] | None = None,
    ) -> Engine:
        """Opens the model (see `Model.open` for what can be wrong with it) and its cache, and starts the thread.

        `warm_up`: before the first request, see `Model.warm_up`. What any of the callbacks raises ends the loading.
        """
        model = Model.open(path, options, progress=progress, on_compile=on_compile)
        try:
            if warm_up:
                model.warm_up(before_warm_up_step)
            cache = open_cache(model.cache_identity, options)
        except BaseException:
            model.close()
            raise
        return cls(
            model,
            options.token_budget,
            cache=cache,
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
        return self._inbox.open

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine itself, if anything did: it takes no more requests then."""
        return self._inbox.failure

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
                checked_max_tokens(request, vocab_size, self.context),
                priority,
                self._inbox.nudge,
                on_events[i] if on_events else None,
                stream,
                request.constraint,
                request.written,
            )
            for i, request in enumerate(requests)
        ]
        for generation, request in zip(generations, requests, strict=True):
            generation.cache_id = checked_cache_id(request, self.cache)
        self._inbox.put(generations)
        return generations

    def warm(
        self,
        token_ids: SequenceOf[int],
        cache_id: str,
        *,
        priority: Priority = "interactive",
        on_event: Callable[[], None] | None = None,
    ) -> Generation:
        """Brings a prefix into the cache under a name that keeps it there. Raises as `warm_request` and `submit` do."""
        request = warm_request(token_ids, cache_id, self.cache, self.model.config.vocab_size, self.context)
        return self.submit_all([request], priority=priority, on_events=on_event and [on_event], stream=False)[0]

    def settle_cache(self) -> None:
        """Waits, for a step at most, until `cache` has all that ended requests computed: the end of an answer is saved after
        its result is out.

        Raises:
            EngineClosed: the engine is closing or has failed.
        """
        self._inbox.saved().result()

    def check_room(self, count: int = 1) -> None:
        """Raises QueueFull if `count` requests would not be taken now, and RequestError if they never would."""
        self._inbox.check_room(count)

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
            waiting=max(0, self._inbox.open - sum(s.state != "idle" for s in slots)),
            steps=totals.steps,
            step_seconds=totals.step_seconds,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            failed_steps=totals.failed_steps,
            preemptions=self._scheduler.preemptions,
            kv_bytes=layout.nbytes,
            kv_bytes_per_token=layout.bytes_per_token,
            cache_ram_bytes=0 if self.cache is None else self.cache.ram_bytes,
            cache_disk_bytes=0 if self.cache is None else self.cache.disk_bytes,
        )

    def stop_admitting(self) -> None:
        """From now on `submit` raises EngineClosed; what was taken goes on."""
        self._inbox.stop_admitting()

    def cancel_all(self, reason: CancelReason = "shutdown") -> None:
        """Cancels whatever is running or waiting, within one step; returns at once."""
        for generation in [*self._inbox.arrived(), *list(self._live.values())]:
            generation.cancel(reason)

    def close(self) -> None:
        """Cancels what is in flight, ends the thread, releases the model; may be called twice."""
        self._inbox.close()
        self._thread.join()
        try:
            if self.cache is not None:
                self.cache.close()
        finally:
            self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------
    def _loop(self) -> None:
        try:
            while self._take_orders():
                more_to_move = self._kv.advance()
                step = self._scheduler.schedule()
                self._kv.make_copies()
                if step is not None:
                    self._run(step)
                elif not more_to_move:
                    self._idle()
        except Exception as error:  # not a step's fault but the engine's own: nobody may wait for an answer for ever
            self._inbox.fail(error)
            self._end_all(error)
            return
        self._end_all(None)
        self._kv.close()

    def _end_all(self, error: Exception | None) -> None:
        orders = self._inbox.take()
        for saved in self._unsaved + orders.saved:
            saved.set_exception(self._inbox.closed())
        for generation in orders.arrived:
            self._live[generation.sequence] = generation
        for sequence, generation in list(self._live.items()):
            generation.cancel("shutdown")
            self._end(sequence, "error" if error else "cancelled", error)

    def _take_orders(self) -> bool:
        """Admits, cancels and pauses; False when it is time to leave."""
        orders = self._inbox.take()
        self._unsaved += orders.saved
        if self._unsaved:
            self._kv.settle()
        while self._unsaved:
            self._unsaved.pop().set_result(None)
        for generation in orders.arrived:
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
        return not orders.closing

    def _idle(self) -> None:
        """Sleeps until there is something to do, at the latest until a reader that stands still has had its time."""
        since = [g.lagging_since for g in self._live.values() if g.lagging_since is not None]
        timeout = None
        if since and self._idle_timeout is not None:
            timeout = max(0.0, min(since) + self._idle_timeout - time.monotonic())
        self._inbox.wait(timeout)

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
        totals = self._totals
        try:
            result = self.model.session.run(step.plan)
            totals.steps += 1  # before anybody hears of the step: who then looks at the totals finds it there
            totals.prompt_tokens += prefill
            totals.generated_tokens += len(step.sampling)
            gaps = self._commit(step, result)
        except Exception as error:  # contained: the step's requests fail, the process and the others go on
            totals.failed_steps += 1
            for sequence in step.sequences:
                self._end(sequence, "error", error)
            return
        seconds = time.perf_counter() - began
        totals.step_seconds += seconds
        if self._on_step is not None:
            self._on_step(StepStats(seconds, sum(step.counts), prefill, len(step.sampling), tuple(gaps)))

    def _commit(self, step: ScheduledStep, result: StepResult) -> list[float]:
        """Takes a step's outcome; answers the seconds that each token came after the one before it."""
        prompts = [s for s in step.sequences if not s.decoding]
        self._scheduler.commit(step)
        self._kv.computed(step)
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
        token_id = generation.next_token(result, row)
        top = generation.params.logprobs
        return generation.accept(token_id, None if top is None else token_logprobs(result.logits[row], token_id, top))

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        generation = self._live.pop(sequence, None)
        if generation is None:  # ended before, in the same step
            return
        if generation.cache_id is not None and error is None:
            self._kv.name(generation.cache_id, sequence)
        self._scheduler.finish(sequence, keep_kv=error is None)
        self._inbox.ended()
        generation.finish(reason, error)
