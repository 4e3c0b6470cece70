"""From the command line to exit code 0: bind, load, serve, and on SIGTERM finish what was begun."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from aiohttp import web

from m40llm.server import logs
from m40llm.server.app import build_app
from m40llm.server.connections import Runner, listen
from m40llm.server.settings import ServerOptions
from m40llm.server.state import STATE, ServerState

_CUT_SECONDS = 5.0  # for handlers to end once their generations are cancelled
_POLL_SECONDS = 0.02
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run_server(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT (a second one cuts what is still running).

    Raises:
        AddressError: the address cannot be listened on; nothing has been loaded.
        Exception: whatever loading the model raised, see `Model.open`.
    """
    logs.set_up(options.log_format)
    asyncio.run(_serve(options))


async def _serve(options: ServerOptions) -> None:
    sockets = await asyncio.to_thread(listen, options.host, options.port)
    app = build_app(options)
    state = app[STATE]
    runner = Runner(
        app,
        handler_cancellation=True,  # a client that goes away takes its generation with it
        access_log=None,
        shutdown_timeout=_CUT_SECONDS,
        keepalive_timeout=75.0,
    )
    cut = asyncio.Event()
    _watch_signals(state, cut)
    watchers = [asyncio.create_task(_watch_parent(state))] if options.exit_with_parent else []
    await runner.setup()
    try:
        for sock in sockets:
            await web.SockSite(runner, sock).start()
        _announce(runner, options)
        await state.stop.wait()
        await _drain(state, cut)
    finally:
        for watcher in watchers:
            watcher.cancel()
        await runner.cleanup()
    if state.load_error is not None:
        raise state.load_error
    logs.event("stopped")


def _announce(runner: web.AppRunner, options: ServerOptions) -> None:
    for address in runner.addresses:
        host, port = address[:2]
        logs.event(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    if options.host not in _LOOPBACK and not options.api_keys:
        logs.event("anybody who reaches this address may use the model; --api-key asks for a key", logging.WARNING)


def _watch_signals(state: ServerState, cut: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if state.stop.is_set():
            cut.set()
        else:
            logs.event("stopping", signal=name)
            state.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)


async def _watch_parent(state: ServerState) -> None:
    """Stops when the process that started this one has ended, however it ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
    logs.event("stopping", reason="the parent process has ended")
    state.stop.set()


async def _drain(state: ServerState, cut: asyncio.Event) -> None:
    """Takes nothing new; lets what runs come to its end, for `drain` seconds at most."""
    state.draining = True
    engine = state.engine
    if engine is None:
        return
    engine.stop_admitting()
    deadline = asyncio.get_running_loop().time() + state.options.drain
    while engine.open_requests and not cut.is_set() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    if engine.open_requests:
        logs.event("cut", logging.WARNING, requests=engine.open_requests)
        engine.cancel_all()
