"""Which form a template has, how its grammar and its parser fit together, and messages for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import jsonschema
import numpy as np
import pytest

from m40llm.config import SamplingParams
from m40llm.sampling import Grammar, GrammarCompiler, Sampler
from m40llm.server.output import MarkupOutput
from m40llm.server.reasoning import ReasoningForm, ReasoningSplitter, reasoning_form
from m40llm.server.tools import ContentDelta, Tool, ToolCallParser, ToolError, ToolForm, tool_form, tool_request
from m40llm.text import Tokenizer
from tests.text_vocabularies import CONTROL, USER_DEFINED, bpe_metadata

MARKERS = {"<|end|>": CONTROL, "[TOOL_CALLS]": CONTROL, "[ARGS]": CONTROL, "<|python_tag|>": CONTROL}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    metadata = bpe_metadata(["t o", "to o", "too l", '{ "', '" :'], {**MARKERS, "<tool_call>": USER_DEFINED})
    metadata["tokenizer.ggml.eos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<|end|>")
    return Tokenizer.from_gguf(metadata)


# The parts of the public templates that tell them apart.
TEMPLATES = {
    "hermes": '{{ "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
    "qwen_xml": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n</tool_call>",
    "llama3": '{%- set ipython = true %}{"name": function name, "parameters": dictionary of argument name and its value}',
    "llama3-tag": "{{ '<|python_tag|>' + tool_call.name }}",
    "mistral": '{{ "[TOOL_CALLS] [" }}',
    "mistral-named": '{{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "generic": "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}",
}


def test_a_form_that_is_not_known_is_described_in_words(tokenizer: Tokenizer) -> None:
    glm = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key></tool_call>{{ tc.arguments.items() }}"
    assert tool_form(glm, tokenizer).name == "generic"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_decides_the_form(tokenizer: Tokenizer, name: str) -> None:
    form = tool_form(TEMPLATES[name], tokenizer)
    assert form.name == name.partition("-")[0]
    assert form.named == (name == "mistral-named")
    control = {text for text in MARKERS if text in TEMPLATES[name] or (name == "llama3" and "python" in text)}
    assert set(form.control) == control
    assert form.written == {tokenizer.encode(text, bos=False)[0] for text in control}


def test_no_template_is_generic(tokenizer: Tokenizer) -> None:
    assert tool_form(None, tokenizer).name == "generic"


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {
    "get_weather": Tool("get_weather", WEATHER, True),
    "now": Tool("now", {"type": "object", "properties": {}}, True),
}


def babble(tokenizer: Tokenizer, grammar: Grammar, form: ToolForm, seed: int) -> tuple[str, bool]:
    """What a model with random logits writes under a grammar: text with the markers that the parser needs, whether it ended."""
    random = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(temperature=0), [], tokenizer.vocab_size, grammar.start())
    text = b""
    for _ in range(600):
        logits = random.normal(size=tokenizer.vocab_size).astype(np.float32) * 4
        for end in tokenizer.eog_ids:  # random text would go on for ever
            logits[end] += 12
        token = sampler.sample(logits)
        if token in tokenizer.eog_ids:
            return text.decode("utf-8", "replace"), True
        sampler.accept(token)
        text += tokenizer.piece(token, special=token in form.written)
        assert sampler.constraint is not None
        if sampler.constraint.finished:
            return text.decode("utf-8", "replace"), True
    return text.decode("utf-8", "replace"), False


def calls_of(form: ToolForm, text: str, tools: Mapping[str, Tool]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form, tools, eager=True)
    content, calls = "", []
    for delta in parser.push(text) + parser.finish():
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif delta.name is not None:
            calls.append((delta.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.complete == len(calls)
    return content, calls


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("several", [False, True])
def test_what_the_grammar_forces_the_parser_finds(tokenizer: Tokenizer, name: str, several: bool) -> None:
    form = tool_form(TEMPLATES[name], tokenizer)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.compile("start: calls\n" + form.grammar(TOOLS, several=several))
    seen = set()
    for seed in range(8):
        text, ended = babble(tokenizer, grammar, form, seed)
        if not ended:
            continue
        content, calls = calls_of(form, text, TOOLS)
        assert content == ""
        assert calls
        assert several or len(calls) == 1
        for called, arguments in calls:
            seen.add(called)
            # Of a string's schema, the XML form enforces `enum` only.
            schema = TOOLS[called].parameters
            if form.name == "qwen_xml" and called == "get_weather":
                schema = {**WEATHER, "properties": {**WEATHER["properties"], "note": {"type": "string"}}}  # type: ignore[dict-item]
            jsonschema.validate(json.loads(arguments), schema)
    assert seen == set(TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("several", [False, True])
def test_free_text_may_call_and_then_calls_well(tokenizer: Tokenizer, name: str, several: bool) -> None:
    form = tool_form(TEMPLATES[name], tokenizer)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.compile(f"start: answer\n{form.lazy_grammar(TOOLS, several=several)}")
    walk = grammar.start()
    for token in tokenizer.encode("just text, no call", bos=False):
        walk.accept(token)
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    walk.restrict(logits)
    assert all(np.isfinite(logits[end]) for end in tokenizer.eog_ids)
    # A call, once begun, cannot name another tool.
    walk = grammar.start()
    opening = {"mistral": "[TOOL_CALLS]", "llama3": "{"}.get(form.name, "so <tool_call>\n")
    if form.name == "qwen_xml":
        opening += "<function="
    elif not form.named:
        opening += ("[" if form.name == "mistral" else "") + ("" if form.name == "llama3" else "{") + '"name": "'
    for token in tokenizer.encode(opening, bos=False):
        walk.accept(token)
    logits[:] = 0
    walk.restrict(logits)
    allowed = {tokenizer.piece(int(i))[:1] for i in np.flatnonzero(np.isfinite(logits))}
    assert allowed == {b"g", b"n"}


class TestRequest:
    TOOL: ClassVar[dict[str, Any]] = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}

    @pytest.mark.parametrize(
        ("tools", "choice", "says"),
        [
            ([{"type": "code"}], None, "tools[0] must be"),
            ([{"type": "function", "function": {"name": "no spaces"}}], None, "name"),
            ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "parameters"),
            ([TOOL, TOOL], None, "was given before"),
            ([TOOL], "always", "expected none, auto, required"),
            ([TOOL], {"type": "function", "function": {"name": "then"}}, "'then'"),
            ([TOOL], {"function": "now"}, "tool_choice must be"),
            ([], "required", "no tools are given"),
            ([TOOL] * 129, None, "128 are the limit"),
        ],
    )
    def test_what_cannot_be_is_refused(self, tools: list[Any], choice: Any, says: str) -> None:
        with pytest.raises(ToolError) as error:
            tool_request(tools, choice)
        assert says in str(error.value)

    def test_the_choice(self) -> None:
        assert tool_request(None).choice == "none"
        assert tool_request([self.TOOL]).choice == "auto"
        assert tool_request([self.TOOL], "none").offered == ()
        named = tool_request([self.TOOL], {"type": "function", "function": {"name": "now"}}, True)
        assert (named.forced, named.parallel, list(named.allowed)) == (True, False, ["now"])


class TestMessages:
    CALL: ClassVar[dict[str, Any]] = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": '{"a": 1}'},
    }

    def test_a_template_without_tools_gets_words(self, tokenizer: Tokenizer) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": "", "tool_calls": [self.CALL, self.CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:01"},
        ]
        prepared, tools = tool_form(None, tokenizer).prepare(messages, [TestRequest.TOOL])
        assert tools is None
        assert [m["role"] for m in prepared] == ["system", "user", "assistant", "user"]
        assert prepared[0]["content"].startswith("Be brief.\n\n")
        assert '"name": "now"' in prepared[0]["content"]
        written = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
        assert prepared[2]["content"] == f"{written}\n{written}"
        assert prepared[3]["content"].count("<tool_response>") == 2
        assert set(prepared[3]) == {"role", "content"}
        assert "tool_calls" in messages[2], "the caller's messages stay as they are"

    def test_mistral_gets_ids_that_its_template_takes(self, tokenizer: Tokenizer) -> None:
        messages = [
            {"role": "assistant", "content": "", "tool_calls": [self.CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        ]
        prepared, tools = tool_form(TEMPLATES["mistral"], tokenizer).prepare(messages, [TestRequest.TOOL])
        assert tools == [TestRequest.TOOL]
        short = prepared[0]["tool_calls"][0]["id"]
        assert prepared[1]["tool_call_id"] == short
        assert len(short) == 9
        assert short.isalnum()


THINK = ReasoningForm("<think>", "</think>", frozenset())


class TestReasoning:
    @pytest.mark.parametrize(
        ("text", "inside", "reasoning", "content"),
        [
            ("<think>\nhm, 1 < 2\n</think>\n\nTwo.\n", False, "hm, 1 < 2", "Two.\n"),
            ("hm\n\nwell\n</think>Two.", True, "hm\n\nwell", "Two."),
            ("\n<think></think>\n", False, "", ""),
            ("never closed </thi", True, "never closed </thi", ""),
            ("No <think>thought</think>.", False, "", "No <think>thought</think>."),
            ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
            ("<thin", False, "", "<thin"),
            ("", True, "", ""),
        ],
    )
    def test_reasoning_is_cut_off_however_the_text_comes(
        self, text: str, inside: bool, reasoning: str, content: str
    ) -> None:
        for size in (1, 2, 3, 7, 100):
            splitter = ReasoningSplitter(THINK, inside=inside)
            parts = [part for at in range(0, len(text), size) for part in splitter.push(text[at : at + size])]
            parts += splitter.finish()
            assert all(piece for _, piece in parts)
            assert "".join(piece for kind, piece in parts if kind == "reasoning") == reasoning
            assert "".join(piece for kind, piece in parts if kind == "content") == content

    def test_the_prompt_says_where_the_answer_starts(self) -> None:
        assert THINK.stage("<|im_start|>assistant\n<think>\n") == "inside"
        assert THINK.stage("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"
        assert THINK.stage("<|im_start|>assistant\n") == "before"

    def test_markers_come_from_the_template_or_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        assert reasoning_form("{{ x.split('</think>')[-1] }}", tokenizer) == THINK
        assert reasoning_form("{{ x }}", tokenizer) is None
        metadata = bpe_metadata([], {"[THINK]": CONTROL, "[/THINK]": CONTROL, "</s>": CONTROL})
        form = reasoning_form(None, Tokenizer.from_gguf(metadata))
        assert form is not None
        assert (form.opening, len(form.written)) == ("[THINK]", 2)

    def test_calls_are_looked_for_behind_the_reasoning_only(self) -> None:
        call = '<tool_call>{"name": "now"}</tool_call>'
        reader = MarkupOutput(
            ReasoningSplitter(THINK, inside=True),
            ToolCallParser(ToolForm("hermes", ("<tool_call>",)), TOOLS, eager=True),
        )
        deltas = [reader.push(f"I could {call}"), reader.push(f"</think>\n\nOk.\n{call}"), reader.flush()]
        assert "".join(d.reasoning for d in deltas) == f"I could {call}"
        assert "".join(d.content for d in deltas) == "Ok."
        assert [c["function"].get("name") for d in deltas for c in d.tool_calls] == ["now", None]
        assert reader.called_tools
