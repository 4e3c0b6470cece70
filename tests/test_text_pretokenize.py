"""Pre-tokenization rules. The expected pieces are what llama.cpp's src/unicode.cpp gives for the same rule and text."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m40llm.text.pretokenize import _RULES, pre_tokenizer

CASES = [
    ("gpt-2", "I'll  pay 1234€!\n", ["I", "'ll", " ", " pay", " 1234", "€!", "\n"]),
    ("smollm", "a  12 ½", ["a", "  ", "1", "2", " ", "½"]),  # the digit pass first: both spaces end at it
    ("gpt-2", "a  12", ["a", " ", " 12"]),
    ("llama-bpe", "I'LL 12345\r\n\r\n x", ["I", "'LL", " ", "123", "45", "\r\n\r\n", " x"]),
    ("llama-bpe", "'ſ", ["'ſ"]),  # only ASCII letters make contractions
    ("qwen2", "x=12;\n\n  y", ["x", "=", "1", "2", ";\n\n", " ", " y"]),
    ("default", "a.b$c 1234", ["a", ".", "b", "$", "c", " ", "123", "4"]),
    ("falcon", "1234 `x`", ["123", "4", " ", "`", "x", "`"]),
    ("deepseek-llm", "中文abc 12\n", ["中文", "abc", " ", "12", "\n"]),
    ("deepseek-coder", "\u2003‣x", ["\u2003", "‣", "x"]),
    ("deepseek-v3", "1234中 don't", ["123", "4", "中", " don", "'t"]),
    ("gpt-4o", "HelloWORLD's a/b/\n", ["Hello", "WORLD's", " a", "/b", "/\n"]),
    ("tekken", "HelloWorld12", ["Hello", "World", "1", "2"]),
    ("command-r", "12 ab", ["1", "2", " ab"]),
    ("superbpe", "x1234567", ["x", "1", "234", "567"]),
    ("afmoe", "ab1234567", ["ab", "1", "234", "567"]),
    ("kimi-k2", "中文abc'S1234", ["中文", "abc'S", "123", "4"]),
]


@pytest.mark.parametrize(("name", "text", "pieces"), CASES)
def test_pieces(name: str, text: str, pieces: list[str]) -> None:
    assert pre_tokenizer(name).split(text) == pieces


@given(st.sampled_from(sorted(_RULES)), st.text())
def test_no_text_is_lost(name: str, text: str) -> None:
    pieces = pre_tokenizer(name).split(text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_letters_newer_than_unicode_15_are_unassigned() -> None:
    assert pre_tokenizer("qwen2").split("ab\U0001e5d0") == ["ab", "\U0001e5d0"]


@pytest.mark.parametrize("name", ["", None, "no-such-rule"])
def test_an_unknown_rule_warns_and_is_default(name: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert pre_tokenizer(name) is pre_tokenizer("default")
    assert "'default'" in caplog.text
