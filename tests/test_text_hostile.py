"""Damaged or hostile vocabularies and chat templates: one clear error each, in bounded time and memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from m40llm.text import ChatTemplate, ChatTemplateError, Tokenizer, TokenizerError
from tests.text_vocabularies import bpe_metadata, spm_metadata

BPE = bpe_metadata(["a b"])
SPM = spm_metadata({"▁": -2.0, "a": -1.0})
N = len(BPE["tokenizer.ggml.tokens"])
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"model": "bert"}, "'bert' is not supported; supported are 'gpt2'"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": 3}, "not a string"),
        ({"pre": "gemma4"}, "not supported"),
        ({"tokens": None}, "missing or empty"),
        ({"tokens": []}, "missing or empty"),
        ({"tokens": np.arange(N)}, "not an array of strings"),
        ({"tokens": ["a", 1]}, "not an array of strings"),
        ({"tokens": [*BPE["tokenizer.ggml.tokens"][:-1], "a"]}, "are both 'a'"),
        ({"token_type": np.ones(N - 1, np.int32)}, f"has {N - 1} entries for {N} tokens"),
        ({"token_type": ["x"] * N}, "not an array of numbers"),
        ({"token_type": np.full(N, 6, np.int32)}, "its type says a byte"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b", "ab"]}, "merges[1] is 'ab'"),
        ({"merges": ["a b", "ab "]}, "merges[1] is 'ab '"),
        ({"merges": 7}, "not an array of strings"),
        ({"eos_token_id": N}, "outside of the vocabulary"),
        ({"bos_token_id": -7}, "outside of the vocabulary"),
        ({"bos_token_id": True}, "not a token id"),
        ({"add_bos_token": "yes"}, "not a boolean"),
        ({"scores": np.full(N, np.nan, np.float32)}, "not finite"),
    ],
)
def test_a_bad_vocabulary_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    metadata = {**BPE, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_gguf(metadata)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sentencepiece_vocabulary_needs_scores() -> None:
    with pytest.raises(TokenizerError, match="scores is missing"):
        Tokenizer.from_gguf({key: value for key, value in SPM.items() if not key.endswith("scores")})


def test_ids_outside_of_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf(BPE)
    for bad in (-1, N):
        with pytest.raises(TokenizerError, match="outside of the vocabulary"):
            tokenizer.decode([bad])
    with pytest.raises(TokenizerError, match="no BOS"):
        tokenizer.encode("a", bos=True)


@pytest.mark.parametrize("character", ["a", " ", "\n", "1", "é", "<"])
@pytest.mark.parametrize(
    "metadata", [BPE, {**BPE, "tokenizer.ggml.pre": "deepseek-llm"}, SPM], ids=["gpt2", "ds", "llama"]
)
def test_long_runs_are_not_quadratic(metadata: dict[str, Any], character: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    text = character * 200_000 + "\x00"
    start = time.monotonic()
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
    assert time.monotonic() - start < 10  # a quadratic step would take minutes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "does not compile: line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("x" * 2_000_000, "are the limit"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: 'roles must alternate'"),
        ("{{ messages.missing.more }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "loops over"),
        ("{% for i in range(1000) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loops over"),
        ("{{ 'x' * 10**9 }}", "more than"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "more than"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "more than"),
        ("{% set x %}" + "{{ 'a' * 1000000 }}" * 40 + "{% endset %}", "more than"),
        ("{% for i in range(100) %}{{ 'x' * 1000000 }}{% endfor %}", "more than"),
        ("{{ 'ab' | replace('a', 'c' * 9000000) | replace('c', 'd' * 9000000) }}", "more than"),
        ("{{ ('y' * 9000000).join(['a'] * 1000) }}", "more than"),
        ("{{ 9 ** 99999999 }}", "too large"),
        ("{{ 'a'.center(10**12) }}", "too large"),
        ("{{ 'a' | indent(10**12) }}", "too large"),
        ("{{ '%9999999999d' % 1 }}", "too wide"),
        ("{{ '{:9999999999d}'.format(1) }}", "too wide"),
        ("{{ '{:{}}'.format(1, 10**12) }}", "too wide"),
    ],
)
def test_a_bad_template_is_one_clear_line(source: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate(source).render(USER)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 10
