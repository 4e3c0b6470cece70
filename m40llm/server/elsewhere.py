"""Routes that callers know from other servers and that are not here: a 404 that says what to use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from m40llm.server.errors import ApiError

_CHAT, _TEXT = "use /v1/chat/completions", "use /v1/completions"
_NO_VECTORS = "m40llm generates text only"

# path, and what to do instead; the first that fits counts
_ROUTES = (
    ("/completion", f"{_TEXT} or /generate"),
    ("/completions", _TEXT),
    ("/chat/completions", _CHAT),
    ("/v1/chat", _CHAT),
    ("/v1/responses", _CHAT),
    ("/v1/responses/{rest:.*}", _CHAT),
    ("/v1/messages", _CHAT),
    ("/v1/messages/{rest:.*}", _CHAT),
    ("/infill", f"{_TEXT} with the model's own markers for filling in"),
    ("/models", "use /v1/models"),
    ("/embedding", _NO_VECTORS),
    ("/embeddings", _NO_VECTORS),
    ("/v1/embeddings", _NO_VECTORS),
    ("/rerank", _NO_VECTORS),
    ("/reranking", _NO_VECTORS),
    ("/v1/rerank", _NO_VECTORS),
    ("/v1/reranking", _NO_VECTORS),
    ("/v1/audio/{rest:.*}", _NO_VECTORS),
    ("/v1/images/{rest:.*}", _NO_VECTORS),
    ("/lora-adapters", "merge the adapter into the model and serve that"),
    ("/slots/{rest:.+}", "slots keep their prompts by themselves; /v1/cache/warm names one"),
    ("/api/chat", _CHAT),
    ("/api/generate", f"{_TEXT} or /generate"),
    ("/api/tags", "use /v1/models"),
    ("/api/show", "use /props"),
    ("/api/ps", "use /slots"),
    ("/api/version", "use /props"),
    ("/api/{rest:.*}", "use OpenAI's API under /v1"),
)


def add_routes_of_others(app: web.Application) -> None:
    """The paths above, after every path that is served."""
    for path, instead in _ROUTES:
        app.router.add_route("*", path, _refuses(instead))


def _refuses(instead: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"{request.path:.80} is not supported; {instead}", code="unsupported_route")

    return refuse
