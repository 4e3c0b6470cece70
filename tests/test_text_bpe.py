"""Byte-pair encoding: tiktoken with derived ranks against the file's merge list, applied literally."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.text import Tokenizer
from m40llm.text.special import SpecialSplitter
from tests.text_vocabularies import CONTROL, USER_DEFINED, bpe_metadata


def _merge_literally(piece: str, merges: list[str]) -> list[str]:
    """The definition: again and again, of the listed pairs that are adjacent, the first in the list, the leftmost."""
    symbols = list(piece)
    while True:
        pairs = [f"{a} {b}" for a, b in pairwise(symbols)]
        listed = [merge for merge in merges if merge in pairs]
        if not listed:
            return symbols
        at = pairs.index(listed[0])
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@st.composite
def _merge_lists(draw: st.DrawFn, trained: bool) -> list[str]:
    """Merge lists as training writes them (parts made before), or in any order; with unreachable and repeated products."""
    parts = list("abc")
    merges: list[str] = []
    for _ in range(draw(st.integers(1, 14))):
        left, right = draw(st.sampled_from(parts)), draw(st.sampled_from(parts))
        if f"{left} {right}" not in merges and len(left + right) <= 12:
            merges.append(f"{left} {right}")
            parts.append(left + right)
    return merges if trained else draw(st.permutations(merges))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), trained=st.booleans())
def test_any_merge_list_is_followed(data: st.DataObject, trained: bool) -> None:
    merges = data.draw(_merge_lists(trained))
    tokenizer = Tokenizer.from_gguf(bpe_metadata(merges))
    for piece in data.draw(st.lists(st.text("abc", min_size=1, max_size=24), min_size=1, max_size=8)):
        ids = tokenizer.encode(piece, bos=False)
        assert [tokenizer.token_text(i) for i in ids] == _merge_literally(piece, merges)


def test_an_unreachable_token_is_never_made() -> None:
    # tiktoken, given all tokens with their ids as ranks, joins i + ng to ing: no such merge is listed.
    tokenizer = Tokenizer.from_gguf(bpe_metadata(["n g", "i n", "in g"]))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ing")] == ["i", "ng"]


def test_ignore_merges_takes_the_whole_piece() -> None:
    metadata = bpe_metadata(["n g", "i n", "in g"], pre="llama-bpe", bos_token_id=0)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ing", bos=False)] == ["ing"]
    assert tokenizer.add_bos  # llama 3's rule, where the file does not say
    assert tokenizer.encode("ing")[0] == 0


def test_a_missing_byte_is_dropped_and_a_nameless_product_falls_apart() -> None:
    metadata = bpe_metadata(["a b"])
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("ab")] = "other"
    tokens[tokens.index("x")] = "also other"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("xab")] == ["a", "b"]


@pytest.mark.parametrize(("special", "expected"), [(True, ["<c>", "a", "<u>"]), (False, ["<", "c", ">", "a", "<u>"])])
def test_control_tokens_need_trust_and_user_defined_ones_do_not(special: bool, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata(["q q"], {"<c>": CONTROL, "<u>": USER_DEFINED}))
    ids = tokenizer.encode("<c>a<u>", special=special)
    assert [tokenizer.token_text(i) for i in ids] == expected
    assert tokenizer.decode(ids) == ("a<u>" if special else "<c>a<u>")


def _split_literally(ids: dict[str, int], text: str) -> list[Any]:
    """llama.cpp's procedure: token by token, the longest first, each cuts every piece of text that is left."""
    parts: list[Any] = [text] if text else []
    for token in sorted(ids, key=lambda t: -len(t.encode())):
        cut: list[Any] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            pieces = part.split(token)
            for n, piece in enumerate(pieces):
                cut += [ids[token]] if n else []
                cut += [piece] if piece else []
        parts = cut
    return parts


@settings(max_examples=500, deadline=None)
@given(
    tokens=st.lists(st.text("ab<é", min_size=1, max_size=5), unique=True, max_size=7), text=st.text("ab<é", max_size=30)
)
def test_special_tokens_claim_their_places_longest_first(tokens: list[str], text: str) -> None:
    ids = {token: n for n, token in enumerate(tokens)}
    assert list(SpecialSplitter(ids).split(text)) == _split_literally(ids, text)
