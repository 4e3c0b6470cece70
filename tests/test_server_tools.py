"""Tools, JSON schemas and reasoning through the official client, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.server_process import ServerProcess, serving

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Current weather in a city.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def new_client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with new_client(server) as client:
        yield client


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[dict[str, str]], list[str]]:
    """(content, calls, finish reasons) of a stream; the shape of its deltas is checked on the way."""
    content, reasons = "", []
    calls: list[dict[str, str]] = []
    for chunk in client.chat.completions.create(model="x", stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.function.name is not None:
                    assert call.index == len(calls)
                    assert call.id is not None
                    assert call.id.startswith("call_")
                    assert call.type == "function"
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                assert call.index == len(calls) - 1
                calls[-1]["arguments"] += call.function.arguments or ""
    return content, calls, reasons


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="x", messages=ASK, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=80
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_a_required_tool_is_called_in_a_stream_as_without(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    content, calls, reasons = streamed(client, **options)
    assert (content, reasons) == ("", ["tool_calls"])
    (call,) = calls
    if call["name"] == "get_weather":
        jsonschema.validate(json.loads(call["arguments"]), WEATHER)
    whole = client.chat.completions.create(model="x", **options).choices[0].message.tool_calls
    assert whole is not None
    assert [(c.function.name, c.function.arguments) for c in whole] == [(call["name"], call["arguments"])]  # type: ignore[union-attr]


def test_a_forced_call_that_is_cut_off_leaks_no_markup(server: ServerProcess, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    for max_tokens in (3, 8):
        content, _, reasons = streamed(client, **options, max_tokens=max_tokens)
        assert (content, reasons) == ("", ["length"])
        choice = client.chat.completions.create(model="x", **options, max_tokens=max_tokens).choices[0]
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert not choice.message.tool_calls


@pytest.mark.parametrize(("choice", "reason"), [(NAMED, "tool_calls"), ("none", "length")])
def test_the_log_says_what_the_reply_says(server: ServerProcess, choice: Any, reason: str) -> None:
    counter = f'm40llm_requests_total{{finish_reason="{reason}"}}'
    before = server.metric(counter, 0)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    reply = server.post("/v1/chat/completions", {**body, "max_tokens": 80 if reason == "tool_calls" else 3}).json
    assert reply["choices"][0]["finish_reason"] == reason
    server.wait_for(lambda: any(entry["id"] == reply["id"] for entry in server.requests))
    assert [entry["finish_reason"] for entry in server.requests if entry["id"] == reply["id"]] == [reason]
    assert server.metric(counter, 0) == before + 1


def test_a_result_goes_back_and_is_answered(client: openai.OpenAI) -> None:
    """SmolLM2's template knows no tools: call and result reach the model as text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is raining."},
    ]
    reply = client.chat.completions.create(model="x", messages=messages, tools=TOOLS, temperature=0, max_tokens=20)
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.choices[0].message.content


SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "film", "strict": True, "schema": SHAPE}}
FILM: Any = [{"role": "user", "content": "Name a film as JSON."}]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_the_answer_satisfies_its_schema(client: openai.OpenAI, temperature: float) -> None:
    reply = client.chat.completions.create(
        model="x", messages=FILM, response_format=FORMAT, temperature=temperature, seed=3, max_tokens=120, n=2
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SHAPE)


def test_the_schema_holds_in_a_stream(client: openai.OpenAI) -> None:
    content, calls, reasons = streamed(client, messages=FILM, response_format=FORMAT, temperature=0, max_tokens=120)
    assert (calls, reasons) == ([], ["stop"])
    jsonschema.validate(json.loads(content), SHAPE)


def test_a_schema_and_tools_leave_the_choice(client: openai.OpenAI) -> None:
    content, calls, reasons = streamed(
        client, messages=FILM, response_format=FORMAT, tools=TOOLS, temperature=0, max_tokens=120
    )
    assert bool(content) != bool(calls)
    assert reasons == ["tool_calls" if calls else "stop"]


def test_json_object_and_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="x", messages=FILM, response_format={"type": "json_object"}, temperature=0, max_tokens=4
    )
    assert reply.choices[0].finish_reason == "length"
    assert (reply.choices[0].message.content or "").startswith("{")


def test_completions_take_a_schema_too(server: ServerProcess) -> None:
    body = {"prompt": "A film: ", "response_format": FORMAT, "temperature": 0, "max_tokens": 120}
    reply = server.post("/v1/completions", body)
    jsonschema.validate(json.loads(reply.json["choices"][0]["text"]), SHAPE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, None),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": 1}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": 1, "reasoning_budget": 2}, "reasoning_budget"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_400_with_the_reason(
    server: ServerProcess, fields: dict[str, Any], param: str | None
) -> None:
    reply = server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 4, **fields})
    assert reply.status == 400, reply.json
    error = reply.json["error"]
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]


# A thinking model with XML calls, as far as the server can tell.
THINKING = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if tools %}<tool_call><function={{ tools[0].function.name }}><parameter=key></tool_call>
{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and not thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinker(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING)
    options = ("--slots", "1", "--ctx-per-slot", "1024", "--chat-template-file", str(template))
    with serving(smollm2_path, *options) as server, new_client(server) as client:
        yield client


def thought_and_said(client: openai.OpenAI, **options: Any) -> tuple[str, Any]:
    """(reasoning, message) of an answer."""
    reply = client.chat.completions.create(model="x", temperature=0, max_tokens=160, **options)
    message = reply.choices[0].message
    return (message.model_extra or {}).get("reasoning_content", ""), message


def test_reasoning_stops_at_its_budget_and_the_answer_keeps_its_schema(thinker: openai.OpenAI) -> None:
    budget = {"thinking_budget": 6}
    thought, message = thought_and_said(thinker, messages=FILM, response_format=FORMAT, extra_body=budget)
    assert 0 < len(thought.split()) <= 6
    jsonschema.validate(json.loads(message.content), SHAPE)


def test_reasoning_streams_apart(thinker: openai.OpenAI) -> None:
    thought, message = thought_and_said(thinker, messages=ASK, extra_body={"thinking_budget": 4})
    reasoning = content = ""
    chunks = thinker.chat.completions.create(
        model="x", messages=ASK, temperature=0, max_tokens=160, stream=True, extra_body={"thinking_budget": 4}
    )
    for chunk in chunks:
        for choice in chunk.choices:
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            content += choice.delta.content or ""
    assert (reasoning, content) == (thought, message.content)
    assert reasoning
    assert "think>" not in reasoning + content


def test_no_reasoning_where_the_prompt_rules_it_out(thinker: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"thinking": False}, "thinking_budget": 4}
    thought, message = thought_and_said(thinker, messages=FILM, response_format=FORMAT, extra_body=body)
    assert thought == ""
    jsonschema.validate(json.loads(message.content), SHAPE)


def test_a_forced_call_comes_behind_the_reasoning(thinker: openai.OpenAI) -> None:
    thought, message = thought_and_said(
        thinker, messages=ASK, tools=TOOLS, tool_choice=NAMED, extra_body={"reasoning_budget": 5}
    )
    assert thought
    assert message.content is None
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}


@pytest.fixture(scope="module")
def qwen(qwen_path: Path) -> Iterator[openai.OpenAI]:
    with serving(qwen_path, "--slots", "1", "--ctx-per-slot", "2048") as server, new_client(server) as client:
        yield client


# Without the second sentence this small model calls again when it has the result.
HINT = "You are a helpful assistant. Use a function when you need it; once you have its result, answer the user in a sentence."
QWEN_ASK: Any = [{"role": "system", "content": HINT}, *ASK]


@pytest.mark.models
def test_qwen_calls_a_tool_in_a_stream_and_answers_its_result(qwen: openai.OpenAI) -> None:
    content, calls, reasons = streamed(qwen, messages=QWEN_ASK, tools=TOOLS, temperature=0, max_tokens=128)
    (call,) = calls
    assert (content, reasons) == ("", ["tool_calls"])
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris", "unit": "celsius"}
    function = {"name": call["name"], "arguments": call["arguments"]}
    messages = [
        *QWEN_ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 31, "sky": "thunderstorm"}'},
    ]
    reply = qwen.chat.completions.create(model="x", messages=messages, tools=TOOLS, temperature=0, max_tokens=64)  # type: ignore[call-overload]
    assert reply.choices[0].finish_reason == "stop"
    assert "31" in (reply.choices[0].message.content or "")


@pytest.mark.models
def test_qwen_calls_the_same_without_a_stream(qwen: openai.OpenAI) -> None:
    reply = qwen.chat.completions.create(model="x", messages=QWEN_ASK, tools=TOOLS, temperature=0, max_tokens=128)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.tool_calls is not None
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}  # type: ignore[union-attr]


@pytest.mark.models
def test_qwen_is_held_to_its_own_markup_for_a_strict_tool(qwen: openai.OpenAI) -> None:
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for choice in ("auto", "required"):
        content, calls, reasons = streamed(
            qwen,
            messages=QWEN_ASK,
            tools=strict,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        assert reasons == ["tool_calls" if calls else "stop"]
        assert calls or (content and choice == "auto")
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), WEATHER)
