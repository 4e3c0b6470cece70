"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from m40llm.config import SamplingParams
from m40llm.engine import Engine
from m40llm.generation import GenerationResult, TokenEvent
from m40llm.server import messages, replies
from m40llm.server.answers import AnswerPlan, plan_answers
from m40llm.server.errors import api_error
from m40llm.server.jobs import Group, Job
from m40llm.server.output import Delta, OutputParser
from m40llm.server.schema import ChatBody, read_body
from m40llm.server.state import ServerState, open_stream, state_of

ROUTE = "/v1/chat/completions"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions, JSON or streamed."""
    state = state_of(request)
    engine = state.ready()
    body = await read_body(request, ChatBody)
    params = body.sampling(logprobs=body.logprob_count)
    engine.check_room(body.choices)
    size = request.content_length or 0
    plan = await state.off_loop(size, plan_answers, state.markup, body, slow=body.needs_grammar)
    ids = await state.off_loop(
        size,
        messages.chat_ids,
        engine.model,
        body.messages,
        limit=state.limit,
        form=state.markup.tools,
        tools=plan.tools.offered,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    plan = plan.behind(ids)
    requests = [plan.request(ids, params) for params in choices_of(params, body.choices)]
    reply = _Reply(state, engine, body, plan)
    with state.running(
        body.named(requests),
        request_id=reply.id,
        route=ROUTE,
        priority=body.priority,
        stream=bool(body.stream),
        finish_reason=reply.finish_reason,
    ) as group:
        if body.stream:
            return await reply.stream(request, group)
        return web.json_response(reply.whole(await group.finish()))


def choices_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """One set per choice; with a seed, choice i has seed + i, so that choices differ and can be repeated."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=(params.seed + i) % 2**64) for i in range(n)]


class _Reply:
    """The reply to one request: its id, its date, and the two shapes that it can take."""

    def __init__(self, state: ServerState, engine: Engine, body: ChatBody, plan: AnswerPlan) -> None:
        self.id = replies.new_id("chatcmpl")
        self._state = state
        self._model = engine.model
        self._body = body
        self._plan = plan
        self._head = {"id": self.id, "created": int(time.time()), "model": state.model_id}

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "usage": replies.usage(results, len(results)),
            "timings": replies.timings(results),
        }

    def finish_reason(self, result: GenerationResult) -> str:
        """What the reply says of this generation, for the log: the handler that reads the answer may be gone by then."""
        parser = self._plan.parser()
        if self._plan.tools.parsed:
            parser.push(result.text)
            parser.flush()
        return _finish_reason(parser, result)

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        parser = self._plan.parser()
        parts = [parser.push(result.text), parser.flush()]
        reasoning = "".join(part.reasoning for part in parts)
        calls = merged_calls([call for part in parts for call in part.tool_calls])
        content = "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": _finish_reason(parser, result),
        }

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        return replies.chat_logprobs(self._model.tokenizer, entries) if self._body.logprobs else None

    async def stream(self, request: web.Request, group: Group) -> web.StreamResponse:
        parsers = [self._plan.parser() for _ in group.jobs]
        with open_stream(request, group) as stream:
            await stream.start()
            first = {"role": "assistant", "content": ""}
            await stream.send(*(self._chunk(job.index, first) for job in group.jobs))
            try:
                async for batch in group.batches(self._state.options.heartbeat):
                    if batch is None:
                        await stream.heartbeat()
                    elif chunks := self._chunks(*batch, parsers[batch[0].index]):
                        await stream.send(*chunks)
                if self._body.include_usage:
                    await stream.send(self._usage(group))
            except Exception as error:
                if (known := api_error(error)) is None:
                    raise
                await stream.send(known.body())
            await stream.end()
            return stream.response

    def _chunks(self, job: Job, events: list[TokenEvent], parser: OutputParser) -> list[dict[str, Any]]:
        """What to send for new events; for their end the last chunk of the choice."""
        if events:
            chunks = []
            for event in events:
                delta = parser.push(event.text)
                if not delta.empty or event.logprobs:
                    chunks.append(self._chunk(job.index, _delta_object(delta), self._logprobs(event.logprobs)))
            return chunks
        result = job.result
        rest = parser.flush()
        chunks = [] if rest.empty else [self._chunk(job.index, _delta_object(rest))]
        last = self._chunk(job.index, {}, finish_reason=_finish_reason(parser, result))
        return [*chunks, {**last, "timings": replies.timings([result])}]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def _usage(self, group: Group) -> dict[str, Any]:
        usage = replies.usage([job.result for job in group.jobs], len(group.jobs))
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}


def _finish_reason(parser: OutputParser, result: GenerationResult) -> str:
    return "tool_calls" if parser.called_tools and result.finish_reason == "stop" else result.finish_reason


def _delta_object(delta: Delta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = delta.tool_calls
    if delta.content or not found:
        found["content"] = delta.content
    return found


def merged_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole tool calls from OpenAI's delta objects: the first piece names, later pieces add to the arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        index = delta["index"]
        if index not in calls:
            calls[index] = {key: value for key, value in delta.items() if key != "index"}
            calls[index]["function"] = dict(delta["function"])
        else:
            calls[index]["function"]["arguments"] += delta["function"].get("arguments", "")
    return [calls[index] for index in sorted(calls)]
