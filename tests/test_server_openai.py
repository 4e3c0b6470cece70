"""The official client, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    return client.models.list().data[0].id


QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]


def test_chat(client: Any, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=12)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == model
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_chat_streams_the_same_answer_with_usage(client: Any, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == (
        [],
        whole.usage and whole.usage.completion_tokens,
    )
    assert len({c.id for c in chunks}) == 1


def test_logprobs_streamed_and_whole(client: Any, model: str) -> None:
    options = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 6}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert "".join(t.token for t in content) == whole.choices[0].message.content
    for token in content:
        assert token.logprob <= 0
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
        assert token.top_logprobs[0].token == token.token  # greedy
        assert bytes(token.bytes).decode() == token.token
    streamed = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    found = [t for c in streamed if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in found] == [t.token for t in content]
    for one, other in zip(found, content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.02)


def test_several_choices_streamed(client: Any, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        n=3,
        seed=1,
        max_tokens=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    ended = [c.choices[0].index for c in stream if c.choices and c.choices[0].finish_reason == "length"]
    assert sorted(ended) == [0, 1, 2]


def test_completions(client: Any, model: str) -> None:
    options = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, logprobs=2)
    choice = whole.choices[0]
    assert choice.text.startswith(" five")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    streamed = client.completions.create(**options, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == choice.text


def test_models(client: Any, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_the_clients_own(client: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="context of 1024") as caught:
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


def test_leaving_a_stream_ends_the_generation(client: Any, model: str, server: ServerProcess) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        for number, _ in enumerate(stream):
            if number == 5:
                break
    server.wait_for(server.idle)
    assert server.requests[-1]["cancelled"] == "client"
    assert server.requests[-1]["generated_tokens"] < 100
