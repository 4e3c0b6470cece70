"""Random bodies to every route: always an answer, never a 5xx, and the server is as before."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server_process import ServerProcess

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
words = st.text(max_size=30)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": words | junk},
        optional={"tool_calls": junk, "name": words, "tool_call_id": words},
    ),
    max_size=3,
)
number = st.floats(-3, 3) | st.integers(-3, 100)
sampling: dict[str, st.SearchStrategy[Any]] = {
    "temperature": number,
    "top_k": number,
    "top_p": st.floats(-0.2, 1.2),
    "min_p": st.floats(0, 1),
    "repeat_penalty": number,
    "repeat_last_n": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": st.integers(-2, 2**65),
    "stop": words | st.lists(words, max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 60000).map(str), number, max_size=3) | junk,
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}) | junk,
    "n": st.integers(0, 3),
    "priority": st.sampled_from(["interactive", "background", "x"]),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "top_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "tools": junk,
    "tool_choice": st.sampled_from(["auto", "none", "required", "x"]) | junk,
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | junk,
    "chat_template_kwargs": junk,
    "n_predict": st.integers(0, 3),
    "max_completion_tokens": st.integers(0, 3),
    "typical_p": number,
    "model": words,
    "user": junk,
    "surprise": junk,
}
ids = st.lists(st.integers(-1, 50000), max_size=5)
required: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/generate": {"prompt": words},
    "/v1/completions": {"prompt": words | st.lists(words, max_size=3) | ids | st.lists(ids, max_size=2)},
    "/v1/chat/completions": {"messages": messages},
    "/apply-template": {"messages": messages},
    "/tokenize": {"content": words},
    "/detokenize": {"tokens": ids},
}
others = {"add_special": st.booleans(), "with_pieces": st.booleans(), "add_generation_prompt": st.booleans()}


@st.composite
def request(draw: st.DrawFn) -> tuple[str, Any]:
    """A route and a body that is nearly right: most fields belong there, most values are of their type."""
    path = draw(st.sampled_from(sorted(required)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(junk)
    body = {name: draw(value) for name, value in required[path].items()}
    if "tokenize" not in path and "template" not in path:
        body["max_tokens"] = draw(st.integers(0, 3))
        names = draw(st.lists(st.sampled_from(sorted(sampling)), max_size=4, unique=True))
        body |= {name: draw(sampling[name]) for name in names}
    else:
        names = draw(st.lists(st.sampled_from(sorted(others)), max_size=2, unique=True))
        body |= {name: draw(others[name]) for name in names}
    if draw(st.integers(0, 9)) == 0 and body:
        body[draw(st.sampled_from(sorted(body)))] = draw(junk)
    return path, body


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(asked=request())
def test_no_body_breaks_the_server(server: ServerProcess, asked: tuple[str, Any]) -> None:
    path, body = asked
    began = time.monotonic()
    if "max_tokens" in (body if isinstance(body, dict) else {}) and not isinstance(body["max_tokens"], int):
        body["max_tokens"] = 2  # None would run to the end of the context
    reply = server.post(path, body)
    assert time.monotonic() - began < 20
    assert reply.status in (200, 400), (reply.status, reply.body)
    if reply.status == 400:
        error = reply.json["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events[-1] == "[DONE]"
        assert not any("error" in event for event in reply.events[:-1])
    else:
        assert isinstance(reply.json, dict)


def test_after_the_fuzz_everything_is_idle_and_nothing_was_an_internal_error(server: ServerProcess) -> None:
    server.wait_for(server.idle)
    assert server.get("/health").status == 200
    assert not any("Traceback" in line or "internal error" in line for line in server.log)
