"""Real vocabularies against llama.cpp's token ids and Hugging Face's rendered templates (tests/data)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.gguf import GGUFFile
from m40llm.text import ChatTemplate, StreamDetokenizer, Tokenizer

DATA = Path(__file__).parent / "data"
MODELS = [
    pytest.param("smollm2_path", "smollm2-135m-instruct-q4_1", id="smollm2"),
    pytest.param("qwen_path", "qwen2.5-coder-1.5b-instruct-q4_k_m", id="qwen", marks=pytest.mark.models),
    pytest.param("gemma_path", "gemma3-270m-q4_k_m", id="gemma", marks=pytest.mark.models),
]
TEXT = st.text() | st.text("ab \n\t'1.<|>é中😀", max_size=60)


def _cases(file: str, model: str) -> list[dict[str, Any]]:
    return json.loads((DATA / file).read_text(encoding="utf-8"))["cases"].get(model, [])


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with GGUFFile.open(smollm2_path) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.mark.parametrize(("fixture", "model"), MODELS)
def test_ids_equal_llama_cpp(fixture: str, model: str, request: pytest.FixtureRequest) -> None:
    with GGUFFile.open(request.getfixturevalue(fixture)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    cases = _cases("tokenize.json", model)
    assert len(cases) == 204
    for case in cases:
        assert tokenizer.encode(case["text"], special=True, bos=False) == case["ids_special"], case["text"]
        assert tokenizer.encode(case["text"], special=False, bos=False) == case["ids_plain"], case["text"]
        assert tokenizer.decode(case["ids_plain"]) == case["text"]
        stream = StreamDetokenizer(tokenizer)
        assert "".join(map(stream.push, case["ids_plain"])) == case["text"]


@pytest.mark.parametrize(("fixture", "model"), MODELS[:2])
def test_templates_equal_hugging_face(fixture: str, model: str, request: pytest.FixtureRequest) -> None:
    with GGUFFile.open(request.getfixturevalue(fixture)) as file:
        template = ChatTemplate.from_gguf(file.metadata)
    assert template is not None
    cases = _cases("chat_template.json", model)
    assert cases
    for case in cases:
        arguments = {key: value for key, value in case.items() if key not in ("name", "messages", "rendered")}
        assert template.render(case["messages"], **arguments) == case["rendered"], case["name"]


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    texts = {smollm2.token_text(i) for i in smollm2.eog_ids}
    assert {"<|im_end|>", "<|endoftext|>"} <= texts  # the file's EOS is <|im_end|>; base-model text ends with the other
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (49152, 1, 2, False)
    assert smollm2.encode("hi", bos=True) == [1, *smollm2.encode("hi")]
    assert smollm2.is_control(2)
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.decode([2]) == ""
    assert smollm2.decode([2], special=True) == "<|im_end|>"


@cache
def _missing_bytes(tokenizer: Tokenizer) -> bytes:
    """Bytes that no text can have in this vocabulary: SmolLM2 lacks a few control characters; llama.cpp drops them too."""
    tokens = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    return bytes(byte for byte in range(256) if bytes([byte]) not in tokens)


def test_smollm2_lacks_few_bytes(smollm2: Tokenizer) -> None:
    assert set(_missing_bytes(smollm2)) <= {*range(32), *range(0xC0, 0xC2), *range(0xF0, 0x100)}


@settings(deadline=None)
@given(text=TEXT)
def test_plain_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, special=False, bos=False)
    assert not any(smollm2.is_control(i) for i in ids)
    known = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text).encode()
    assert smollm2.decode(ids) == known.translate(None, delete=_missing_bytes(smollm2)).decode("utf-8", "replace")


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), special=st.booleans())
def test_stream_equals_decode(smollm2: Tokenizer, ids: list[int], special: bool) -> None:
    stream = StreamDetokenizer(smollm2, special=special)
    ids = [
        *ids,
        *smollm2.encode("x", special=False, bos=False),
    ]  # a character that is not whole before it never will be
    assert "".join(map(stream.push, ids)) == smollm2.decode(ids, special=special)


def test_stream_ends_before_an_unfinished_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a👀", special=False, bos=False)
    assert len(ids) > 2
    stream = StreamDetokenizer(smollm2)
    assert "".join(map(stream.push, ids[:-1])) == "a"
    assert stream.push(ids[-1]) == "👀"
