"""The sockets and what is said on them before a request is one: addresses that cannot be had, bytes that are no HTTP."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from m40llm.server import logs
from m40llm.server.errors import ApiError

_BACKLOG = 128


class AddressError(ValueError):
    """An address that cannot be listened on; the message names the option that helps."""


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`; who connects before the server is up waits in their queues.

    Raises:
        AddressError: the host is unknown or not this machine's, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"--host {host} is not known: {_reason(error)}; give an address of this machine") from None
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise AddressError(_why_not(error, host, port)) from None
    return sockets


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken; choose another with --port (0: any free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; 0.0.0.0 listens on all it has"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one from 1024 on with --port"
    return f"cannot listen on {host}, port {port}: {_reason(error)}; choose others with --host and --port"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class Runner(web.AppRunner):
    """aiohttp's runner, whose connections answer in OpenAI's shape also what no handler ever sees."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            loop=server._loop,
            **server._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # aiohttp reads what is left of a body once more, after the handler has answered that it cannot be read
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to bytes that are no request, and to a failure outside of every middleware; closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun; there is no room for an error in it")
        if isinstance(exc, HttpProcessingError):
            known = ApiError(status, _no_http(exc), code="invalid_http")
            logs.event("refused", status=status, reason=known.message)
        else:
            logs.event("internal error", logging.ERROR, exc, path=request.path)
            known = ApiError(status, "internal error; the server's log has more", code="internal")
        response = known.response()
        response.force_close()
        return response


def _no_http(error: HttpProcessingError) -> str:
    if isinstance(error, ContentEncodingError):
        return "the body's Content-Encoding cannot be undone here; send it as it is, without that header"
    return f"this is no HTTP request: {error.message.splitlines()[0].rstrip(':')[:200]}"
