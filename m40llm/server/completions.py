"""`POST /v1/completions`: text continued, without a template."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from m40llm.engine import Engine, Request
from m40llm.generation import GenerationResult, TokenEvent
from m40llm.server import replies
from m40llm.server.answers import schema_grammar
from m40llm.server.chat import choices_of
from m40llm.server.errors import ApiError, api_error
from m40llm.server.jobs import Group, Job
from m40llm.server.limits import PromptLimit
from m40llm.server.schema import CompletionBody, read_body
from m40llm.server.state import ServerState, open_stream, state_of
from m40llm.text import Tokenizer

ROUTE = "/v1/completions"
_MAX_SEQUENCES = 256


async def completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's text completions, JSON or streamed; several prompts give their choices in order."""
    state = state_of(request)
    engine = state.ready()
    body = await read_body(request, CompletionBody)
    params = body.sampling(logprobs=body.logprobs)
    tokenizer = engine.model.tokenizer
    prompts = _prompts(body)
    if len(prompts) * body.choices > _MAX_SEQUENCES:
        raise ApiError(400, f"prompts times n are more than {_MAX_SEQUENCES}; send less at once", param="prompt")
    engine.check_room(len(prompts) * body.choices)
    encoded = await state.off_loop(request.content_length or 0, _encoded, tokenizer, state.limit, prompts)
    grammar = await state.off_loop(
        0, schema_grammar, state.markup.grammars, body.response_format, slow=bool(body.response_format)
    )
    requests = [
        Request(ids, each, None if grammar is None else grammar.start())
        for ids in encoded
        for each in choices_of(params, body.choices)
    ]
    reply = _Reply(state, engine, body, _echoes(tokenizer, prompts, body))
    with state.running(
        body.named(requests), request_id=reply.id, route=ROUTE, priority=body.priority, stream=bool(body.stream)
    ) as group:
        if body.stream:
            return await reply.stream(request, group)
        return web.json_response(reply.whole(await group.finish()))


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """OpenAI's four forms of a prompt as one: a list of texts or of token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return [given] if isinstance(given[0], int) else list(given)


def _encoded(tokenizer: Tokenizer, limit: PromptLimit, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    for prompt in prompts:
        if isinstance(prompt, str):
            limit.check(prompt)
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _echoes(tokenizer: Tokenizer, prompts: Sequence[str | list[int]], body: CompletionBody) -> list[str]:
    """What `echo` puts before each choice. Ids outside of the vocabulary are the engine's to refuse."""
    if not body.echo:
        return [""] * (len(prompts) * body.choices)
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            prompt = tokenizer.decode(prompt, special=True)
        texts += [prompt] * body.choices
    return texts


class _Reply:
    def __init__(self, state: ServerState, engine: Engine, body: CompletionBody, echoes: list[str]) -> None:
        self.id = replies.new_id("cmpl")
        self._state = state
        self._body = body
        self._echoes = echoes
        self._logprobs = [replies.TextLogprobs(engine.model.tokenizer, len(echo)) for echo in echoes]
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model_id,
        }

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [
            self._choice(i, self._echoes[i] + result.text, result.logprobs, result.finish_reason)
            for i, result in enumerate(results)
        ]
        usage = replies.usage(results, self._body.choices)
        return {**self._head, "choices": choices, "usage": usage, "timings": replies.timings(results)}

    def _choice(self, index: int, text: str, entries: Sequence[Any], finish_reason: str | None) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else self._logprobs[index].of(entries)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    async def stream(self, request: web.Request, group: Group) -> web.StreamResponse:
        with open_stream(request, group) as stream:
            await stream.start()
            if self._body.echo:
                await stream.send(*(self._chunk(i, echo) for i, echo in enumerate(self._echoes)))
            try:
                async for batch in group.batches(self._state.options.heartbeat):
                    if batch is None:
                        await stream.heartbeat()
                    elif chunks := self._chunks(*batch):
                        await stream.send(*chunks)
                if self._body.include_usage:
                    results = [job.result for job in group.jobs]
                    usage = replies.usage(results, self._body.choices)
                    await stream.send({**self._head, "choices": [], "usage": usage})
            except Exception as error:
                if (known := api_error(error)) is None:
                    raise
                await stream.send(known.body())
            await stream.end()
            return stream.response

    def _chunks(self, job: Job, events: list[TokenEvent]) -> list[dict[str, Any]]:
        if events:
            return [self._chunk(job.index, e.text, e.logprobs) for e in events if e.text or e.logprobs]
        result = job.result
        return [{**self._chunk(job.index, "", (), result.finish_reason), "timings": replies.timings([result])}]

    def _chunk(
        self, index: int, text: str, entries: Sequence[Any] = (), finish_reason: str | None = None
    ) -> dict[str, Any]:
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": [self._choice(index, text, entries, finish_reason)], **usage}
