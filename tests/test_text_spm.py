"""SentencePiece vocabularies: merging by score, byte fallback, the space prefix, streaming."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.text import StreamDetokenizer, Tokenizer
from tests.text_vocabularies import CONTROL, USER_DEFINED, spm_metadata

PIECES = {"▁": -9.0, "a": -8.0, "b": -8.5, "ab": -1.0, "▁a": -0.5, "bab": -0.1, "é": -7.0, "▁▁": -3.0, "<": -9.5}
EXTRA = {"<turn>": CONTROL, "[x]": USER_DEFINED}


@pytest.fixture(scope="module")
def prefixed() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata(PIECES, EXTRA))


@pytest.fixture(scope="module")
def bare() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata(PIECES, EXTRA, add_space_prefix=False, add_bos_token=False))


def _texts(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


def test_the_best_score_is_joined_first(bare: Tokenizer) -> None:
    assert _texts(bare, "abab") == ["ab", "ab"]  # both ab, at -1, come before bab can be seen
    assert _texts(bare, "bab") == ["bab"]  # b + ab, the only way to it


def test_space_prefix_after_control_tokens_but_not_after_text(prefixed: Tokenizer) -> None:
    assert _texts(prefixed, "a<turn>a [x]b") == ["<s>", "▁a", "<turn>", "▁a", "▁", "[x]", "▁", "b"]


def test_bytes_for_unknown_characters(bare: Tokenizer) -> None:
    assert _texts(bare, "aß\n") == ["a", "<0xC3>", "<0x9F>", "<0x0A>"]
    assert bare.decode(bare.encode("aß\n")) == "aß\n"


def test_control_texts_are_plain_text_without_trust(bare: Tokenizer) -> None:
    ids = bare.encode("<turn></s>", special=False)
    assert not any(bare.is_control(i) for i in ids)
    assert bare.decode(ids) == "<turn></s>"


def test_an_answer_that_continues_keeps_its_space(prefixed: Tokenizer) -> None:
    ids = prefixed.encode("a", bos=False)
    assert StreamDetokenizer(prefixed, continues=True).push(ids[0]) == " a"
    assert StreamDetokenizer(prefixed).push(ids[0]) == prefixed.decode(ids) == "a"


def test_default_ids_of_the_llama_tokenizer(prefixed: Tokenizer) -> None:
    assert (prefixed.bos_id, prefixed.eos_id, prefixed.add_bos) == (1, 2, True)
    assert prefixed.eog_ids == {2}


@settings(deadline=None)
@given(text=st.text("ab é\nß▁😀<", max_size=40))
def test_text_comes_back_but_for_the_space_character(prefixed: Tokenizer, bare: Tokenizer, text: str) -> None:
    for tokenizer in (prefixed, bare):
        ids = tokenizer.encode(text, special=False, bos=False)
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        stream = StreamDetokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) == tokenizer.decode(ids)


def test_a_character_is_never_cut(bare: Tokenizer) -> None:
    stream = StreamDetokenizer(bare)
    assert [stream.push(i) for i in bare.encode("😀")] == ["", "", "", "😀"]
    assert stream.push(bare.encode("😀")[0]) == ""
    assert stream.push(bare.encode("a")[-1]) == "\ufffda"  # it never became one
