"""What handlers share: one object per application, under one key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from m40llm.engine import Engine, EngineClosed, Request
from m40llm.engine_stats import EngineStats
from m40llm.scheduler import Priority
from m40llm.server import jobs, logs
from m40llm.server.answers import ModelMarkup
from m40llm.server.errors import ApiError
from m40llm.server.jobs import FinishReasonOf, Group, Job, Notifier, as_generated
from m40llm.server.limits import PromptLimit
from m40llm.server.metrics import Metrics
from m40llm.server.settings import ServerOptions
from m40llm.server.sse import EventStream

_T = TypeVar("_T")
_INLINE_CHARACTERS = 4096  # a prompt this short is tokenized in less time than a change of threads takes


@dataclass(eq=False)
class ServerState:
    """The server's parts. `engine` is None while the model loads; `load_error` is why it never will be there."""

    options: ServerOptions
    metrics: Metrics = field(init=False)
    notifier: Notifier = field(init=False)
    limit: PromptLimit = field(init=False)  # there when the engine is
    engine: Engine | None = None
    load_error: BaseException | None = None
    draining: bool = False
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    streams: set[EventStream] = field(default_factory=set)
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "m40llm-text"))
    request_seconds: float = 1.0  # how long a request takes, a moving average
    _markup: ModelMarkup | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.stats)

    def stats(self) -> EngineStats | None:
        return None if self.engine is None else self.engine.stats()

    def ready(self) -> Engine:
        """The engine.

        Raises:
            ApiError: 503 while the model loads, and at shutdown.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        if self.engine is None:
            raise ApiError(503, "loading model", code="loading", headers={"Retry-After": "2"})
        if self.engine.failure is not None:
            raise EngineClosed(f"the engine has failed: {self.engine.failure}; restart the server")
        return self.engine

    @property
    def markup(self) -> ModelMarkup:
        """The markup of the model's answers. Raises as `ready`."""
        if self._markup is None:
            self._markup = ModelMarkup(self.ready().model)
        return self._markup

    @property
    def model_id(self) -> str:
        """The name that replies carry."""
        return self.options.names[0] if self.options.names else self.options.model_path.stem

    def retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free."""
        slots = 1 if self.engine is None else self.engine.model.session.kv_layout.n_slots
        return min(60.0, self.request_seconds / slots)

    async def off_loop(self, size: int, call: Callable[..., _T], *args: Any, slow: bool = False, **kwargs: Any) -> _T:
        """Runs text work of `size` characters: here if small and not known to be slow, else beside the event loop."""
        if size <= _INLINE_CHARACTERS and not slow:
            return call(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.workers, partial(call, *args, **kwargs))

    @contextmanager
    def running(
        self,
        requests: Sequence[Request],
        *,
        request_id: str,
        route: str,
        priority: Priority | None,
        stream: bool,
        finish_reason: FinishReasonOf = as_generated,
    ) -> Iterator[Group]:
        """See `jobs.running`."""
        with jobs.running(
            self.ready(),
            self.notifier,
            requests,
            request_id=request_id,
            route=route,
            priority=priority or "interactive",
            stream=stream,
            finish_reason=finish_reason,
        ) as group:
            yield group

    def job_ended(self, job: Job) -> None:
        """On the event loop, once per generation, whether or not anybody still listens."""
        result = job.generation.outcome
        assert result is not None
        t = result.timings
        if result.finish_reason in ("stop", "length"):
            self.request_seconds += 0.1 * (t.prefill_s + t.decode_s - self.request_seconds)
        reason = job.finish_reason(result)
        self.metrics.request_ended(result, reason)
        logs.request_ended(job, reason)


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)


def state_of(request: web.Request) -> ServerState:
    return request.app[STATE]


@contextmanager
def open_stream(request: web.Request, group: Group) -> Iterator[EventStream]:
    """An event stream that the reaper watches."""
    streams = state_of(request).streams
    stream = EventStream(request, group)
    streams.add(stream)
    try:
        yield stream
    finally:
        streams.discard(stream)
