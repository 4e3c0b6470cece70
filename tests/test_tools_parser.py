"""Tool calls out of streamed text: every form, every way to cut the text, and markup that is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.server.tools import CallDelta, ContentDelta, Tool, ToolCallParser, ToolForm
from m40llm.server.tools.body import Status
from m40llm.server.tools.json_stream import JsonValue

HERMES = ToolForm("hermes", ("<tool_call>", "```json"), "{")
XML = ToolForm("qwen_xml", ("<tool_call>", "<function="))
LLAMA = ToolForm("llama3", ("<|python_tag|>",), "{", {"<|python_tag|>": 7})
MISTRAL = ToolForm("mistral", ("[TOOL_CALLS]",), control={"[TOOL_CALLS]": 5})
MISTRAL_NAMED = ToolForm(
    "mistral",
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    control={"[TOOL_CALLS]": 5, "[ARGS]": 6, "[CALL_ID]": 7},
    named=True,
)

TOOLS = {
    "get_weather": Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "tags": {"type": "array"},
                "unit": {"type": ["string", "null"]},
            },
        },
    ),
    "now": Tool("now", {"type": "object", "properties": {}}),
}

Parsed = tuple[str, list[tuple[str, str]]]


def parse(form: ToolForm, pieces: list[str], *, eager: bool) -> Parsed:
    """(content, [(name, arguments)]) and, on the way, what every stream of deltas must keep to."""
    parser = ToolCallParser(form, TOOLS, eager=eager)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content, calls = "", []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.name is not None:
            assert delta.id is not None
            assert delta.id.startswith("call_")
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.id is None
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


def cuts(text: str) -> list[list[str]]:
    """The text whole, by characters, and at random places."""
    dice = random.Random(len(text))
    ways = [[text], list(text)]
    for _ in range(6):
        at = sorted(dice.sample(range(len(text) + 1), min(4, len(text))))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


PARIS = '{"city": "Paris \\u00e9\\"}", "days": 2}'
GOOD: list[tuple[ToolForm, str, Parsed]] = [
    (
        HERMES,
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        ("", [("get_weather", PARIS)]),
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"days": 1.5e3}, "name": "get_weather"}</tool_call>',
        ("", [("get_weather", '{"days": 1.5e3}')]),
    ),
    (
        HERMES,
        'Let me look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>',
        ("Let me look.", [("now", "{}"), ("now", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("now", '{"a": 1}')])),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}', ("", [("now", "{}")])),  # the end came before the tag
    (HERMES, 'a <tool_call>{"name": "now"}</tool_call> b', ("a b", [("now", "{}")])),
    (HERMES, '```json\n{"name": "now", "arguments": {}}\n```', ("", [("now", "{}")])),
    (HERMES, 'So:\n```json\n{"name": "now", "arguments": {}}\n```\n', ("So:", [("now", "{}")])),
    (HERMES, '<tool_call>{{"name": "now", "arguments": {"a": {}}}}</tool_call>', ("", [("now", '{"a": {}}')])),
    (HERMES, '{"name": "now", "arguments": {}}', ("", [("now", "{}")])),
    (LLAMA, '{"name": "get_weather", "parameters": {"days": 1}}', ("", [("get_weather", '{"days": 1}')])),
    (LLAMA, '\n{"type": "function", "function": "now", "parameters": {}}; {"name": "now"}', ("", [("now", "{}")] * 2)),
    (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', ("", [("now", "{}")])),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', ("", [("get_weather", PARIS)])),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]',
        ("", [("now", "{}")] * 2),
    ),
    (
        MISTRAL_NAMED,
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{"days": 1}',
        ("", [("now", "{}"), ("get_weather", '{"days": 1}')]),
    ),
    (
        XML,
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n[1, "b"]\n</parameter>\n<parameter=unit>\n5\n</parameter>\n'
        "</function>\n</tool_call>",
        (
            "",
            [("get_weather", '{"city": "New\\n\\"York\\"", "days": 3, "metric": true, "tags": [1, "b"], "unit": "5"}')],
        ),
    ),
    (XML, "ok\n<function=now>\n</function>\n", ("ok", [("now", "{}")])),
    (
        XML,
        "<tool_call><function=get_weather><parameter=city>\n</parameter></function></tool_call>",
        ("", [("get_weather", '{"city": ""}')]),
    ),
    (
        XML,
        "<tool_call><function=get_weather><parameter=city>a < b\n\n</par\n</parameter></function></tool_call>",
        ("", [("get_weather", '{"city": "a < b\\n\\n</par"}')]),
    ),
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("form", "text", "expected"), GOOD, ids=range(len(GOOD)))
def test_calls_are_found_however_the_text_is_cut(form: ToolForm, text: str, expected: Parsed, eager: bool) -> None:
    for pieces in cuts(text):
        content, calls = parse(form, pieces, eager=eager)
        assert (content, calls) == expected
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


BAD: list[tuple[ToolForm, str]] = [
    (HERMES, "<tool_call>\nnot json\n</tool_call>"),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": 5}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": "five"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "name": "now"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": '),
    (HERMES, '<tool_call>{"name": "now"} and so on</tool_call>'),
    (HERMES, "<tool_call"),
    (HERMES, '```json\n{"name": "Ada", "age": 36}\n```\nand ```js'),
    (HERMES, '{"name": "now", "age": 36}'),
    (HERMES, '{{"name": "now", "arguments": {}}'),
    (HERMES, '{{{"name": "now", "arguments": {}}}}'),
    (HERMES, "a < b, <tool_ca, <tool_call>"),
    (HERMES, " spaces around \n"),
    (HERMES, "\n"),
    (HERMES, '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 500),
    (LLAMA, '{"city": "Paris"}'),
    (LLAMA, '{"name": "unknown", "parameters": {}}'),
    (LLAMA, 'Here: {"name": "now", "parameters": {}}'),
    (MISTRAL, "see [TOOL_ CALLS]"),
    (XML, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (XML, "<tool_call><function=now><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>"),
    (XML, "<tool_call><function=get_weather><parameter=city>Par"),
]


@pytest.mark.parametrize(("form", "text"), BAD, ids=range(len(BAD)))
def test_markup_that_is_no_call_is_content_to_the_last_character(form: ToolForm, text: str) -> None:
    for pieces in cuts(text):
        assert parse(form, pieces, eager=False) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (LLAMA, '<|python_tag|>brave.call(query="x")', 'brave.call(query="x")'),
        (MISTRAL, "[TOOL_CALLS]sorry", "sorry"),
        (MISTRAL, "[TOOL_CALLS][TOOL_CALLS] x", " x"),
        (MISTRAL_NAMED, "a[ARGS]b", "ab"),
    ],
)
def test_control_tokens_never_become_content(form: ToolForm, text: str, content: str) -> None:
    for pieces in cuts(text):
        assert parse(form, pieces, eager=True) == (content, [])


def test_a_limit_ends_the_search() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    parser = ToolCallParser(HERMES, TOOLS, eager=False, limit=1)
    deltas = parser.push(call + call) + parser.finish()
    assert parser.complete == 1
    assert deltas[-1] == ContentDelta(call)


def test_a_good_call_after_a_bad_one_counts() -> None:
    text = '<tool_call><tool_call>{"name": "now"}</tool_call>'
    for pieces in cuts(text):
        assert parse(HERMES, pieces, eager=False) == ("<tool_call>", [("now", "{}")])


def test_eager_streams_the_name_first_and_arguments_as_they_come() -> None:
    parser = ToolCallParser(HERMES, TOOLS, eager=True)
    assert parser.push("Sure.") == [ContentDelta("Sure.")]
    assert parser.push("\n<tool_call>\n{") == []
    assert parser.push('"name": "get_weather", "arguments": ') == []
    first, second = parser.push('{"city": ')
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get_weather", "")
    assert second == CallDelta(0, None, None, '{"city": ')
    assert parser.push('"Par') == [CallDelta(0, None, None, '"Par')]
    assert parser.complete == 0
    assert parser.push('is"}}\n</tool_call>') == [CallDelta(0, None, None, 'is"}')]
    assert parser.complete == 1
    assert parser.push("\n") + parser.finish() == []


def test_eager_markup_that_breaks_leaves_an_incomplete_call() -> None:
    parser = ToolCallParser(HERMES, TOOLS, eager=True)
    deltas = parser.push('<tool_call>{"name": "now", "arguments": {"a": oops}}') + parser.finish()
    assert parser.complete == 0
    assert isinstance(deltas[0], CallDelta)
    assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == "oops}}"


def test_text_that_may_become_a_marker_stays_private() -> None:
    parser = ToolCallParser(HERMES, TOOLS, eager=True)
    assert parser.push("a <tool") == [ContentDelta("a")]
    assert parser.push("box>") == [ContentDelta(" <toolbox>")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    seed=st.integers(0, 99),
    indent=st.sampled_from([None, 1]),
)
def test_any_arguments_come_out_as_they_went_in(arguments: dict[str, Any], seed: int, indent: int | None) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=bool(seed % 2))
    for form, text in (
        (HERMES, f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'),
        (LLAMA, f'{{"name": "now", "parameters": {written}}}'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "now", "arguments": {written}}}]'),
        (MISTRAL_NAMED, f"[TOOL_CALLS]now[ARGS]{written}"),
    ):
        at = random.Random(seed).randrange(len(text))
        for eager in (False, True):
            assert parse(form, [text[:at], text[at:]], eager=eager) == ("", [("now", written)])


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet='{}[]",:\\ \n0123456789.-+eEtrufalsn', max_size=24))
def test_the_scanner_agrees_with_the_json_module(text: str) -> None:
    value = JsonValue()
    statuses = [Status.OPEN]
    for character in text + " ":
        if statuses[-1] is Status.OPEN:
            statuses.append(value.step(character))
    ended = statuses[-1]
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    if valid:
        assert ended in (Status.DONE, Status.BEFORE)
    elif ended in (Status.DONE, Status.BEFORE):  # a value, and then something else
        used = len(statuses) - 1 - (ended is Status.BEFORE)
        json.loads(text[:used])
