"""Generation: one request's handle — its events for the reader, its state for the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from m40llm.config import SamplingParams
from m40llm.sampling import Constraint, Sampler, StopChecker, TokenLogprobs
from m40llm.scheduler import Priority, Sequence
from m40llm.session import StepResult
from m40llm.text import StreamDetokenizer, Tokenizer

State = Literal["created", "queued", "running", "settling", "completed", "cancelled", "failed"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
CancelReason = Literal["client", "idle", "shutdown"]  # asked for; the reader stood still; the engine closes

# A reader may lag this many tokens behind before its sequence stops being scheduled.
EVENT_LIMIT = 256


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """Prompt tokens in the KV cache so far (counting reused ones), of all prompt tokens."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Committed output: it will not be taken back. `text` may be empty while a character or a stop string is incomplete."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


Event = PrefillEvent | TokenEvent


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `prefill_s` runs from the first scheduled step to the first token, `decode_s` from there to the last."""

    queued_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens: int  # computed, without the reused ones
    decode_tokens: int  # after the first

    @property
    def prefill_tok_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The one terminal outcome of a request. `slot` is -1 when it never had one; `logprobs` has an entry per token if asked for."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    stop_string: str | None
    seed: int
    timings: Timings
    slot: int = -1
    logprobs: tuple[TokenLogprobs, ...] = ()
    cancel_reason: CancelReason | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


class GenerationFailed(RuntimeError):
    """A step of this request failed; the message says how. Other requests are not affected."""


@dataclass(slots=True)
class _Clock:
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first: float | None = None
    last: float | None = None


class Generation:
    """Iterate for events; `result` waits for the end. Safe to use from any thread; the engine's methods are marked so."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_tokens: int,
        priority: Priority,
        wake_engine: Callable[[], None],
        on_event: Callable[[], None] | None,
        stream: bool = True,
        constraint: Constraint | None = None,
        written: Collection[int] = (),
    ) -> None:
        self.params = params
        self.sampler = Sampler(params, prompt_ids, vocab_size, constraint)
        self.stops = StopChecker(params.stop, tokenizer.eog_ids, ignore_eos=params.ignore_eos)
        self.sequence = Sequence(list(prompt_ids), priority)
        self.max_tokens = max_tokens
        self.cache_id: str | None = None  # the cache entry that it becomes
        self._detokenizer = StreamDetokenizer(tokenizer, written=written)
        self._wake_engine = wake_engine
        self._on_event = on_event
        self._stream = stream
        self.slot = -1
        self.token_gap: float | None = None  # seconds between the last two tokens
        self.lagging_since: float | None = None  # the engine's own
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # an event, or the end: who reads events waits here
        self._settled = threading.Condition(
            lock
        )  # the end, or events that nobody reads: `result` need not wake per token
        self._events: deque[Event] = deque()
        self._state: State = "created"
        self._cancel: CancelReason | None = None
        self._error: BaseException | None = None
        self._text: list[str] = []
        self._output: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._clock = _Clock()
        self._result: GenerationResult | None = None

    # -- the reader --------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        return self._state

    @property
    def finished(self) -> bool:
        return self._result is not None

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return len(self._output)

    @property
    def outcome(self) -> GenerationResult | None:
        """The result if there is one; never waits and never raises."""
        return self._result

    def cancel(self, reason: CancelReason = "client") -> None:
        """Asks the engine to stop within one step; harmless in every state and when repeated: the first reason stays."""
        if self._cancel is None and self._result is None:
            self._cancel = reason
            self._wake_engine()

    def poll(self) -> Event | None:
        """The next event if there is one; never waits."""
        with self._changed:
            event = self._events.popleft() if self._events else None
            resume = len(self._events) == EVENT_LIMIT // 2
        if resume:
            self._wake_engine()
        return event

    def __iter__(self) -> Iterator[Event]:
        """Events until the end.

        Raises:
            GenerationFailed: the request's step failed.
        """
        while True:
            with self._changed:
                while not self._events and self._result is None:
                    self._changed.wait()
            event = self.poll()
            if event is not None:
                yield event
            elif self._result is not None:
                self.raise_for_error()
                return

    @property
    def result(self) -> GenerationResult:
        """Waits for the end. Events that nobody read are dropped.

        Raises:
            GenerationFailed: the request's step failed.
        """
        with self._settled:
            while self._result is None:
                if len(self._events) > EVENT_LIMIT // 2:
                    self._events.clear()
                    self._wake_engine()
                self._settled.wait()
        self.raise_for_error()
        return self._result

    def raise_for_error(self) -> None:
        if self._error is not None:
            raise GenerationFailed(f"generation failed: {self._error}") from self._error

    # -- the engine's thread -----------------------------------------------------------------------
    @property
    def cancelled(self) -> bool:
        return self._cancel is not None

    @property
    def lagging(self) -> bool:
        """The reader is `EVENT_LIMIT` events behind."""
        return len(self._events) >= EVENT_LIMIT

    def queued(self) -> None:
        self._state = "queued"

    def started(self) -> None:
        self.slot = self.sequence.slot
        if self._clock.started is None:
            self._clock.started = time.perf_counter()
            self._state = "running"

    def prefilled(self) -> None:
        if self._stream and not self._output:  # a preempted request's second prefill is nobody's business
            self._post(PrefillEvent(self.sequence.num_computed, self.sequence.prompt_tokens))

    def next_token(self, result: StepResult, row: int) -> int:
        """Chooses from as little of the step's outcome as the request needs: an id, a few candidates, a row of logits."""
        sampler = self.sampler
        if not sampler.needs_logits:
            return int(result.ids[row])
        few = sampler.enough_candidates if self.params.logprobs is None else 0  # those want the whole row anyhow
        best = result.candidates(row, few) if few else None
        return sampler.sample(result.logits[row]) if best is None else sampler.sample_candidates(*best)

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Takes one sampled token: records it, emits what is final, and says whether the request ends here and why."""
        now = time.perf_counter()
        self.token_gap = None if self._clock.last is None else now - self._clock.last
        self._clock.first = self._clock.first or now
        self._clock.last = now
        if self.stops.ends(token_id):
            return "stop"
        self.sampler.accept(token_id)
        self._output.append(token_id)
        self.sequence.tokens.append(token_id)
        if logprobs:
            self._logprobs.append(logprobs)
        text, stopped = self.stops.push(self._detokenizer.push(token_id))
        self._emit((token_id,), text, (logprobs,) if logprobs else ())
        complete = self.sampler.constraint is not None and self.sampler.constraint.finished
        if stopped or complete:
            return "stop"
        return "length" if len(self._output) >= self.max_tokens else None

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """The terminal outcome; only the first call counts."""
        if self._result is not None:
            return
        self._state = "settling"
        if error is None and not self.stops.stopped:
            tail, stopped = self.stops.flush()  # a character that is not whole is no text
            reason = "stop" if stopped else reason
            if tail:
                self._emit((), tail, ())
        self._error = error
        result = GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._output),
            prompt_tokens=self.sequence.prompt_tokens,
            cached_tokens=self.sequence.num_reused,
            finish_reason=reason,
            stop_string=self.stops.matched,
            seed=self.sampler.seed,
            timings=self._timings(),
            slot=self.slot,
            logprobs=tuple(self._logprobs),
            cancel_reason=self._cancel if reason == "cancelled" else None,
        )
        with self._changed:
            self._state = "failed" if error else "cancelled" if reason == "cancelled" else "completed"
            self._result = result
            self._changed.notify_all()
            self._settled.notify_all()
        self._notify()

    def _emit(self, ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprobs, ...]) -> None:
        self._text.append(text)
        if self._stream:
            self._post(TokenEvent(ids, text, logprobs))

    def _post(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
            if len(self._events) > EVENT_LIMIT // 2:
                self._settled.notify_all()
        self._notify()

    def _notify(self) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event()
        except Exception:  # whoever listened is gone (a closed event loop): nobody wants the rest, and the others go on
            self._on_event = None
            self._cancel = self._cancel or "client"

    def _timings(self) -> Timings:
        clock = self._clock
        started = clock.started or time.perf_counter()
        first = clock.first or started
        return Timings(
            queued_s=started - clock.submitted,
            prefill_s=first - started,
            decode_s=(clock.last or first) - first,
            prefill_tokens=self.sequence.prompt_tokens - self.sequence.num_reused if clock.first else 0,
            decode_tokens=max(0, len(self._output) - 1),
        )
