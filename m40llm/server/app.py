"""The application: routes, middlewares, and the engine's life inside the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from aiohttp import web

from m40llm.engine import Engine, EngineClosed
from m40llm.model import COMPILING
from m40llm.server import chat, completions, generate, logs, middleware, native
from m40llm.server.cache_routes import add_cache_routes
from m40llm.server.chat_page import add_chat_page
from m40llm.server.elsewhere import add_routes_of_others
from m40llm.server.jobs import Notifier
from m40llm.server.limits import PromptLimit
from m40llm.server.settings import ServerOptions
from m40llm.server.slots import default_slots
from m40llm.server.state import STATE, ServerState

_REAP_SECONDS = 1.0


def build_app(options: ServerOptions) -> web.Application:
    """The application for `options`; the model loads once it runs, and /health says when it is there."""
    app = web.Application(
        client_max_size=options.max_body_bytes,
        middlewares=[middleware.errors, middleware.cors, middleware.api_key],
    )
    app[STATE] = ServerState(options)
    app.on_response_prepare.append(middleware.add_headers)
    app.cleanup_ctx.append(_engine)
    app.cleanup_ctx.append(_reaper)
    add_routes(app)
    return app


def add_routes(app: web.Application) -> None:
    """Every path that this server answers."""
    app.add_routes(
        [
            web.post(generate.ROUTE, generate.generate),
            web.post(chat.ROUTE, chat.chat_completions),
            web.post(completions.ROUTE, completions.completions),
            web.get("/v1/models", native.models),
            web.get("/v1/models/{model:.+}", native.model),
            web.get("/health", native.health),
            web.get("/v1/health", native.health),
            web.get("/metrics", native.metrics),
            web.get("/props", native.props),
            web.get("/slots", native.slots),
            web.post("/tokenize", native.tokenize),
            web.post("/detokenize", native.detokenize),
            web.post("/apply-template", native.apply_template),
        ]
    )
    add_cache_routes(app)
    add_chat_page(app)
    add_routes_of_others(app)


async def _engine(app: web.Application) -> AsyncIterator[None]:
    """Loads the model beside the event loop, so that /health can answer meanwhile; closes it at the end."""
    state = app[STATE]
    state.notifier = Notifier(asyncio.get_running_loop(), state.job_ended)
    loading = asyncio.create_task(asyncio.to_thread(_load, state))
    loading.add_done_callback(lambda task: _loaded(state, task))
    yield
    await asyncio.wait([loading])  # a thread cannot be stopped; what it opened has to be closed
    state.workers.shutdown(wait=False, cancel_futures=True)
    if state.engine is not None:
        await asyncio.to_thread(state.engine.close)
        await asyncio.sleep(0)  # the last wake-ups, for the log's lines


def _load(state: ServerState) -> Engine:
    options = state.options
    slots = options.slots or default_slots(options.model_path, options.runtime)
    runtime = replace(options.runtime, slots=slots, max_queue=options.max_queue, idle_timeout_s=options.idle_timeout)
    logs.event("loading", model=options.model_path, slots=slots)
    loading = _Loading(state)
    engine = Engine.load(
        options.model_path,
        runtime,
        on_compile=loading.compiles,
        on_step=state.metrics.step,
        warm_up=options.warm_up,
        before_warm_up_step=loading.check,
        progress=loading.read,
    )
    state.limit = PromptLimit(engine.model.tokenizer, engine.context)
    return engine


class _Loading:
    """A thread cannot be ended from outside; it can ask, while it reads, compiles and warms up, whether that is still wanted."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._said = False

    def check(self) -> None:
        """Raises EngineClosed once the server has been told to stop."""
        if self._state.stop.is_set():
            raise EngineClosed("stopped while loading")

    def read(self, done: int, total: int) -> None:
        self.check()

    def compiles(self, name: str) -> None:
        self.check()
        if not self._said:
            self._said = True
            logs.event(COMPILING)


def _loaded(state: ServerState, task: asyncio.Task[Engine]) -> None:
    error = task.exception()
    if error is not None:
        if not isinstance(error, EngineClosed):
            state.load_error = error
        state.stop.set()
        return
    state.engine = engine = task.result()
    if state.stop.is_set():  # it came too late, and is there to be closed
        return
    logs.event("device", reason=engine.model.device_reason)
    for note in engine.model.notes:
        logs.event(note)
    logs.event("ready", model=state.model_id, load_s=round(engine.model.load_s, 2), runs_on=engine.model.description)


async def _reaper(app: web.Application) -> AsyncIterator[None]:
    """Drops connections whose reader has stood still for the idle time: their handlers wait in a write."""
    state = app[STATE]

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            for stream in list(state.streams):
                if stream.stuck(loop.time(), state.options.idle_timeout):
                    logs.event("dropped a reader that stood still", seconds=state.options.idle_timeout)
                    stream.abort()

    task = asyncio.create_task(watch())
    yield
    task.cancel()
