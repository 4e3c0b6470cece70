"""`POST /generate`: one prompt, one answer, with as little around it as possible."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from m40llm.engine import Request
from m40llm.generation import GenerationResult
from m40llm.model import Model
from m40llm.server import messages, replies
from m40llm.server.errors import api_error
from m40llm.server.jobs import Group
from m40llm.server.limits import PromptLimit
from m40llm.server.schema import GenerateBody, read_body
from m40llm.server.state import ServerState, open_stream, state_of

ROUTE = "/generate"


async def generate(request: web.Request) -> web.StreamResponse:
    """{prompt, max_tokens, …} → {"output": text, "finish_reason", "usage", "timings", …}, or a stream of `output` pieces."""
    state = state_of(request)
    engine = state.ready()
    body = await read_body(request, GenerateBody)
    params = body.sampling()
    engine.check_room()
    ids = await state.off_loop(len(body.prompt), _ids, engine.model, state.limit, body)
    request_id = replies.new_id("gen")
    with state.running(
        body.named([Request(ids, params)]),
        request_id=request_id,
        route=ROUTE,
        priority=body.priority,
        stream=bool(body.stream),
    ) as group:
        if body.stream:
            return await _stream(request, state, group, request_id)
        (result,) = await group.finish()
        return web.json_response({"output": result.text, **_rest(state, result, request_id)})


def _ids(model: Model, limit: PromptLimit, body: GenerateBody) -> list[int]:
    """As `m40llm generate`: through the model's template if it has one, unless the prompt is to stay as it is."""
    limit.check(body.prompt)
    if body.prompt_format == "raw" or model.chat_template is None:
        return model.tokenizer.encode(body.prompt)
    return messages.chat_ids(model, [{"role": "user", "content": body.prompt}])


def _rest(state: ServerState, result: GenerationResult, request_id: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "model": state.model_id,
        "finish_reason": result.finish_reason,
        "stop": result.stop_string,
        "seed": result.seed,
        "usage": replies.usage([result]),
        "timings": replies.timings([result]),
    }


async def _stream(request: web.Request, state: ServerState, group: Group, request_id: str) -> web.StreamResponse:
    with open_stream(request, group) as stream:
        await stream.start()
        try:
            async for batch in group.batches(state.options.heartbeat):
                if batch is None:
                    await stream.heartbeat()
                    continue
                job, events = batch
                if text := "".join(event.text for event in events):
                    await stream.send({"output": text})
                elif not events:
                    await stream.send({"output": "", **_rest(state, job.result, request_id)})
        except Exception as error:
            if (known := api_error(error)) is None:
                raise
            await stream.send(known.body())
        await stream.end()
        return stream.response
