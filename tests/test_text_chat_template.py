"""Chat templates: choosing one, what it gets, and Hugging Face's filters and blocks."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from m40llm.text import ChatTemplate, ChatTemplateError

USER = [{"role": "user", "content": "hi"}]
KEY = "tokenizer.chat_template"


def _render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    return ChatTemplate(source).render(messages or USER, **arguments)


def test_a_file_without_template_has_none() -> None:
    assert ChatTemplate.from_gguf({}) is None


def test_named_templates_and_overrides() -> None:
    metadata = {KEY: "plain", f"{KEY}.tool_use": "tools", f"{KEY}.rag": "rag", "tokenizer.chat_templates": ["rag"]}

    def rendered(override: str | None = None, tools: list[dict[str, Any]] | None = None) -> str:
        template = ChatTemplate.from_gguf(metadata, override)
        assert template is not None
        return template.render(USER, tools=tools)

    assert rendered() == "plain"
    assert rendered(tools=[{}]) == "tools"
    assert rendered("rag", tools=[{}]) == "rag"
    assert rendered("{{ messages[0].content }}!") == "hi!"
    with pytest.raises(
        ChatTemplateError,
        match=r"no chat template is named 'nope' \(the file's: default, tool_use, rag; always: chatml\)",
    ):
        rendered("nope")
    assert rendered("chatml") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    metadata[f"{KEY}.chatml"] = "the file's own"
    assert rendered("chatml") == "the file's own"
    with pytest.raises(ChatTemplateError, match="not a text"):
        ChatTemplate.from_gguf({KEY: 3})


def test_token_texts_are_variables() -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 9,
    }
    template = ChatTemplate.from_gguf({KEY: "{{ bos_token }}|{{ eos_token is defined }}", **tokens})
    assert template is not None
    assert template.render(USER) == "<s>|False"


def test_tojson_is_plain_json() -> None:
    value = {"ü": "<b>&'", "n": [1, None]}
    assert _render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert _render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)


def test_blocks_lose_their_lines_and_loops_may_break() -> None:
    source = "  {% for m in messages %}\n{% if loop.index == 2 %}\n  {% break %}\n{% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    assert _render(source, USER * 3) == "hi\nend"


def test_strftime_and_generation_blocks() -> None:
    source = "{{ strftime_now('%Y') }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    assert _render(source) == f"{datetime.now():%Y}hi"


def test_text_functions_work_within_limits() -> None:
    source = "{{ 'a,b'.replace(',', '-') }} {{ '+'.join(['x', 'y']) }} {{ messages | join('|', attribute='role') }}"
    source += (
        " {{ '%s-%5.1f' % ('p', 2.5) }} {{ '{}'.format(4) }} {{ 'bb' | replace('b', 'z', 1) }} {{ 'c'.ljust(3) }}."
    )
    assert _render(source) == "a-b x+y user p-  2.5 4 zb c  ."


def test_arguments_of_tool_calls_become_mappings() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert _render(source, [message]) == '{"x": "ü"}'
    assert call["function"]["arguments"] == '{"x": "ü"}'  # the caller's message is left as it was
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]}
    assert _render(source, [bad]) == '"no json"'


def test_text_parts_for_both_kinds_of_templates() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert _render("{{ messages[0].content }}", parts) == "a\nb"
    aware = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert _render(aware, parts) == "[a][b]"


def test_further_variables_do_not_replace_the_messages() -> None:
    assert _render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert _render("{{ tools is none }} {{ add_generation_prompt }}", add_generation_prompt=False) == "True False"
