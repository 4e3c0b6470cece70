"""Routes of the prefix cache: what it holds, entries with names, and bringing it to disk."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from pydantic import Field, model_validator

from m40llm.engine import Engine
from m40llm.kv.prefix_cache import CacheError, PrefixCache, UnknownCacheId
from m40llm.request import warm_request
from m40llm.server import messages, replies
from m40llm.server.errors import ApiError
from m40llm.server.schema import Body, read_body
from m40llm.server.state import ServerState, state_of

WARM = "/v1/cache/warm"


class WarmBody(Body):
    """`POST /v1/cache/warm`: the prefix is a text as it stands, token ids, or messages through the template."""

    cache_id: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False

    @model_validator(mode="after")
    def _one_prefix(self) -> WarmBody:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either 'prompt' or 'messages'", param="prompt")
        if self.tools is not None and self.messages is None:
            raise ApiError(400, "'tools' need 'messages'", param="tools")
        return self


def add_cache_routes(app: web.Application) -> None:
    """The paths below."""
    app.add_routes(
        [
            web.get("/v1/cache/stats", stats),
            web.post(WARM, warm),
            web.delete("/v1/cache/{cache_id:.+}", evict),
            web.post("/admin/flush", flush),
        ]
    )


async def stats(request: web.Request) -> web.Response:
    """Sizes and counters of both tiers, and the entries with names."""
    return web.json_response(await asyncio.to_thread(_cache(state_of(request)).stats))


async def warm(request: web.Request) -> web.Response:
    """{cache_id, prompt | messages} → {"cache_id", "tokens", "cached_tokens"} once the prefix is computed and kept."""
    state = state_of(request)
    engine = state.ready()
    cache = _cache(state)
    body = await read_body(request, WarmBody)
    engine.check_room()
    ids = await state.off_loop(request.content_length or 0, _ids, state, engine, body)
    try:
        wanted = warm_request(ids, body.cache_id, cache, engine.model.config.vocab_size, engine.context)
    except CacheError as error:
        raise ApiError(409, str(error), param="cache_id", code="cache_conflict") from None
    with state.running([wanted], request_id=replies.new_id("warm"), route=WARM, priority=None, stream=False) as group:
        (result,) = await group.finish()
    await asyncio.to_thread(engine.settle_cache)
    return web.json_response(
        {"cache_id": body.cache_id, "tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens}
    )


async def evict(request: web.Request) -> web.Response:
    """Removes an entry and the blocks that only it needs → {"cache_id", "evicted_blocks"}."""
    state, cache_id = state_of(request), request.match_info["cache_id"]
    cache = _cache(state)
    await asyncio.to_thread(state.ready().settle_cache)
    try:
        blocks = await asyncio.to_thread(cache.evict, cache_id)
    except UnknownCacheId as error:
        raise ApiError(404, str(error), code="cache_id_not_found") from None
    return web.json_response({"cache_id": cache_id, "evicted_blocks": blocks})


async def flush(request: web.Request) -> web.Response:
    """Waits until everything kept is on disk, all of the answers given so far included → {"written_blocks"}."""
    state = state_of(request)
    cache = _cache(state)
    before = cache.written_blocks
    await asyncio.to_thread(state.ready().settle_cache)
    await asyncio.to_thread(cache.flush)
    return web.json_response({"written_blocks": cache.written_blocks - before})


def _cache(state: ServerState) -> PrefixCache:
    cache = state.ready().cache
    if cache is None:
        raise ApiError(
            404, "there is no prefix cache; start with --cache-ram-mb or --cache-disk-dir", code="cache_disabled"
        )
    return cache


def _ids(state: ServerState, engine: Engine, body: WarmBody) -> list[int]:
    if body.messages is not None:
        return messages.chat_ids(
            engine.model,
            body.messages,
            limit=state.limit,
            form=state.markup.tools,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
        )
    if isinstance(body.prompt, str):
        state.limit.check(body.prompt)
        return engine.model.tokenizer.encode(body.prompt)
    return body.prompt or []
