"""Engine: owns the thread that owns the device. Handlers submit and read; the thread schedules, runs, commits, posts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from os import PathLike
from types import TracebackType

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.generation import FinishReason, Generation
from m40llm.model import Model, OnCompile
from m40llm.sampling import token_logprobs
from m40llm.scheduler import Priority, ScheduledStep, Scheduler, Sequence
from m40llm.session import StepResult
from m40llm.weights import LoadProgress


class RequestError(ValueError):
    """A request that cannot run; the message names the problem and the remedy. Nothing was computed for it."""


class EngineClosed(RuntimeError):
    """The engine is shutting down and takes no more requests."""


class Engine:
    """Continuous batching over one `Model`. Use as a context manager; `close` cancels what is in flight.

    `submit` may be called from any thread.
    """

    def __init__(self, model: Model, token_budget: int) -> None:
        self.model = model
        self._scheduler = Scheduler(model.session.kv_layout.n_slots, token_budget)
        self._live: dict[Sequence, Generation] = {}  # the thread's own
        self._inbox: deque[Generation] = deque()
        self._wake = threading.Condition()
        self._nudged = False
        self._closing = False
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
    ) -> Engine:
        """Opens the model (see `Model.open` for what can be wrong with it) and starts the thread."""
        return cls(Model.open(path, options, progress=progress, on_compile=on_compile), options.token_budget)

    @property
    def context(self) -> int:
        """Positions per slot."""
        return self.model.session.kv_layout.context

    def submit(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: Priority = "interactive",
        on_event: Callable[[], None] | None = None,
    ) -> Generation:
        """Queues a request and returns at once.

        Args:
            on_event: called on the engine's thread after each event and at the end; must return quickly.

        Raises:
            RequestError: the prompt is empty, or prompt and `max_tokens` do not fit a slot's context.
            SamplingError: the logit bias names a token outside the vocabulary.
            EngineClosed: after `close`.
        """
        vocab_size = self.model.config.vocab_size
        generation = Generation(
            list(prompt_ids),
            params,
            self.model.tokenizer,
            vocab_size,
            self._max_tokens(prompt_ids, params, vocab_size),
            priority,
            self._nudge,
            on_event,
        )
        with self._wake:
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            self._inbox.append(generation)
            self._wake.notify()
        return generation

    def _max_tokens(self, prompt_ids: SequenceOf[int], params: SamplingParams, vocab_size: int) -> int:
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
        while self._take_orders():
            step = self._scheduler.schedule()
            if step is None:
                self._idle()
                continue
            for sequence in step.sequences:
                self._live[sequence].started()
            try:
                result = self.model.session.run(step.plan)
                self._commit(step, result)
            except Exception as error:  # contained: the step's requests fail, the process and the others go on
                for sequence in step.sequences:
                    self._end(sequence, "error", error)
        for sequence in list(self._live):
            self._end(sequence, "cancelled")

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
        for sequence, generation in list(self._live.items()):
            if generation.cancelled:
                self._end(sequence, "cancelled")
            else:
                sequence.paused = generation.lagging
        return not closing

    def _idle(self) -> None:
        with self._wake:
            while not (self._inbox or self._nudged or self._closing):
                self._wake.wait()

    def _commit(self, step: ScheduledStep, result: StepResult) -> None:
        prompts = [s for s in step.sequences if not s.decoding]
        self._scheduler.commit(step)
        for sequence in prompts:
            self._live[sequence].prefilled()
        for row, sequence in enumerate(step.sampling):
            generation = self._live[sequence]
            try:
                reason = self._sample(generation, result, row)
            except Exception as error:
                self._end(sequence, "error", error)
                continue
            if reason is not None:
                self._end(sequence, reason)

    def _sample(self, generation: Generation, result: StepResult, row: int) -> FinishReason | None:
        token_id = (
            generation.sampler.sample(result.logits[row]) if generation.sampler.needs_logits else int(result.ids[row])
        )
        top = generation.params.logprobs
        return generation.accept(token_id, None if top is None else token_logprobs(result.logits[row], token_id, top))

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        generation = self._live.pop(sequence)
        self._scheduler.finish(sequence, keep_kv=error is None)
        generation.finish(reason, error)
