"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html, with OpenAI's `data: [DONE]`."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp import web
from pydantic_core import to_json  # a seventh of json.dumps' time, with every token of every stream

from m40llm.server.jobs import Group

# A stream is a trickle. The kernel would take megabytes of it for a reader that stands still: back-pressure shall come sooner.
_SEND_BUFFER = 1 << 16

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}


class EventStream:
    """A response that is written as it comes. `send` waits while the reader is slow: that is the back-pressure."""

    def __init__(self, request: web.Request, group: Group) -> None:
        self._request = request
        self._group = group
        self._response = web.StreamResponse(headers=HEADERS)
        self._writing_since: float | None = None

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self) -> None:
        transport = self._request.transport
        sock = None if transport is None else transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        await self._response.prepare(self._request)

    async def send(self, *values: Any) -> None:
        """One event each, in one write."""
        await self._write(b"".join(b"data: %b\n\n" % to_json(value) for value in values))

    async def heartbeat(self) -> None:
        """A comment, which readers skip: a peer that died without a word is noticed by it."""
        await self._write(b": keep-alive\n\n")

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()

    def stuck(self, now: float, limit: float) -> bool:
        """Whether a write has waited for the reader for more than `limit` seconds."""
        return self._writing_since is not None and now - self._writing_since > limit

    def abort(self) -> None:
        """Cancels the generations and drops the connection; the handler is cancelled by that."""
        self._group.cancel("idle")
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _write(self, data: bytes) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        try:
            await self._response.write(data)
        finally:
            self._writing_since = None
