"""Between two worlds: generations, which live on the engine's thread, and handlers, which live on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from m40llm.engine import Engine, Request
from m40llm.generation import CancelReason, Generation, GenerationResult, PrefillEvent, TokenEvent
from m40llm.scheduler import Priority
from m40llm.server.errors import ApiError

# What a reply calls the end of a generation: its text may have been a tool call.
FinishReasonOf = Callable[[GenerationResult], str]


def as_generated(result: GenerationResult) -> str:
    return result.finish_reason


@dataclass(eq=False)
class Job:
    """One generation of a request. `index` is its place among the choices, `prompt` that among the prompts."""

    request_id: str
    route: str
    index: int
    finish_reason: FinishReasonOf
    generation: Generation = field(init=False)
    reported: bool = False

    @property
    def result(self) -> GenerationResult:
        """The outcome of a finished generation.

        Raises:
            GenerationFailed: its step failed.
            ApiError: it was cut off: 503 at shutdown, 408 for a reader that stood still.
        """
        self.generation.raise_for_error()
        result = self.generation.outcome
        assert result is not None
        if result.finish_reason == "cancelled":
            if result.cancel_reason == "idle":
                raise ApiError(408, "the stream was not read and has been given up; read it, or raise --idle-timeout")
            raise ApiError(503, "the server is shutting down; try again", code="shutting_down")
        return result


class Notifier:
    """Carries wake-ups from the engine's thread to the event loop: one for a whole step, however many jobs it touched."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Job], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._due: deque[tuple[Job, asyncio.Event]] = deque()
        self._pending = False

    def notify(self, job: Job, ready: asyncio.Event) -> None:
        """From any thread."""
        self._due.append((job, ready))
        if not self._pending:
            self._pending = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._pending = False  # first: what comes from now on needs a wake-up of its own
        while self._due:
            job, ready = self._due.popleft()
            ready.set()
            if not job.reported and job.generation.finished:
                job.reported = True
                self._on_end(job)


class Group:
    """The generations of one HTTP request."""

    def __init__(self, jobs: list[Job], ready: asyncio.Event) -> None:
        self.jobs = jobs
        self._ready = ready

    def cancel(self, reason: CancelReason = "client") -> None:
        for job in self.jobs:
            job.generation.cancel(reason)

    async def finish(self) -> list[GenerationResult]:
        """Waits for all. Raises as `Job.result`."""
        while not all(job.generation.finished for job in self.jobs):
            self._ready.clear()
            await self._ready.wait()
        return [job.result for job in self.jobs]

    async def batches(self, heartbeat: float) -> AsyncIterator[tuple[Job, list[TokenEvent]] | None]:
        """(job, its new events); an empty list at its end; None after `heartbeat` seconds in which nothing was sent."""
        loop = asyncio.get_running_loop()
        running = list(self.jobs)
        last = loop.time()
        while running:
            self._ready.clear()
            sent = False
            for job in list(running):
                finished = job.generation.finished  # before the events: what comes after the last one is the end
                events = list(_token_events(job.generation))
                if not events and not finished:
                    continue
                if not events:
                    running.remove(job)
                sent = True
                yield job, events
            if sent:
                last = loop.time()
                continue
            if loop.time() - last >= heartbeat:
                last = loop.time()
                yield None
            alarm = loop.call_later(max(0.001, last + heartbeat - loop.time()), self._ready.set)
            try:
                await self._ready.wait()
            finally:
                alarm.cancel()


def _token_events(generation: Generation) -> Iterator[TokenEvent]:
    while (event := generation.poll()) is not None:
        if not isinstance(event, PrefillEvent):
            yield event


@contextmanager
def running(
    engine: Engine,
    notifier: Notifier,
    requests: Sequence[Request],
    *,
    request_id: str,
    route: str,
    priority: Priority = "interactive",
    stream: bool = False,
    finish_reason: FinishReasonOf = as_generated,
) -> Iterator[Group]:
    """Submits all requests; whatever is still running when the block is left is cancelled. `finish_reason` is for log and metrics.

    Raises what `Engine.submit_all` raises.
    """
    ready = asyncio.Event()
    jobs = [Job(request_id, route, index, finish_reason) for index in range(len(requests))]
    callbacks = [_callback(notifier, job, ready) for job in jobs]
    # Until `generation` is set, below, no callback's delivery can run: this is the loop's own thread.
    generations = engine.submit_all(requests, priority=priority, on_events=callbacks, stream=stream)
    for job, generation in zip(jobs, generations, strict=True):
        job.generation = generation
    try:
        yield Group(jobs, ready)
    finally:
        for generation in generations:
            generation.cancel()


def _callback(notifier: Notifier, job: Job, ready: asyncio.Event) -> Callable[[], None]:
    return lambda: notifier.notify(job, ready)
