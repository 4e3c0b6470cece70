"""Token ids to text while they arrive, without ever cutting a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from m40llm.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class StreamDetokenizer:
    """Text of a growing sequence of tokens: what push() returns, joined, is ``tokenizer.decode(ids)`` as far as it is whole.

    A character that the tokens end within never comes out; bytes that cannot become one are U+FFFD.

    Args:
        tokenizer: the vocabulary.
        special: whether control tokens are written out.
        written: control tokens that are written out in any case.
        continues: the ids go on in a text that was there before (a raw prompt), so that a SentencePiece vocabulary's leading
            space is part of the text and stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool = False,
        continues: bool = False,
        written: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._written = frozenset(written)
        self._at_start = not continues
        self._decoder = _utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; bytes of an unfinished character wait for the next token.

        Raises:
            TokenizerError: the id is outside of the vocabulary.
        """
        data = self._tokenizer.piece(token_id, special=self._special or token_id in self._written)
        if self._at_start and data:
            data = self._tokenizer.strip_prefix(data)
            self._at_start = False
        return self._decoder.decode(data)
