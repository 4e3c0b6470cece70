"""Around every handler: errors in OpenAI's shape, API keys, CORS, the request's id."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from m40llm.server import logs
from m40llm.server.errors import ApiError, api_error
from m40llm.server.replies import new_id
from m40llm.server.state import STATE, state_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID = "m40llm_request_id"
_PUBLIC = frozenset(("/", "/health", "/v1/health", "/favicon.ico"))
_PUBLIC_FOLDER = "/static/"


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost: no exception gets past it, and every failure is logged in one line."""
    request[REQUEST_ID] = new_id("req")
    state = state_of(request)
    try:
        response = await handler(request)
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        if isinstance(error, ConnectionError):  # the reader has gone, and a write knew it before aiohttp cancelled this
            raise asyncio.CancelledError from error  # aiohttp would log anything else as this program's failure
        known = api_error(error, state.retry_after())
        if known is None:
            logs.event("internal error", logging.ERROR, error, id=request[REQUEST_ID], path=request.path)
            known = ApiError(500, f"internal error; the server's log has {request[REQUEST_ID]}", code="internal")
        logs.event("refused", status=known.status, method=request.method, path=request.path, reason=known.message)
        response = known.response()
    state.metrics.response(request.method, response.status)
    return response


@web.middleware
async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers preflights, before any key is asked for: browsers send them without."""
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        wanted = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": "86400",
        }
        return web.Response(status=204, headers=headers)
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before any response is sent, streams included."""
    origin = request.app[STATE].options.cors_origin
    if origin:
        response.headers.setdefault("Access-Control-Allow-Origin", origin)
        if origin != "*":
            response.headers.setdefault("Vary", "Origin")
    if REQUEST_ID in request:
        response.headers.setdefault("X-Request-Id", request[REQUEST_ID])


@web.middleware
async def api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses whoever has no key, if there are keys."""
    keys = state_of(request).options.api_keys
    public = request.path in _PUBLIC or request.path.startswith(_PUBLIC_FOLDER)
    if keys and not public and not _known(_given(request), keys):
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return await handler(request)


def _given(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")


def _known(given: str, keys: tuple[str, ...]) -> bool:
    """Compares with every key in constant time: how long it takes tells nothing of the keys."""
    data = given.encode("utf-8", "surrogateescape")
    # a list, not a generator: all keys are compared, whichever fits
    equal = [hmac.compare_digest(data, key.encode()) for key in keys]
    return any(equal)
