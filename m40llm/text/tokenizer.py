"""The tokenizer of a GGUF file: text to token ids and back, id for id as llama.cpp does it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from m40llm.text.bpe import BytePairEncoder, decode_byte_alphabet
from m40llm.text.errors import TokenizerError
from m40llm.text.pretokenize import PreTokenizer, pre_tokenizer
from m40llm.text.special import SpecialSplitter, end_of_generation
from m40llm.text.spm import SPACE, SentencePieceEncoder
from m40llm.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, flag

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Text to token ids and back. Immutable after construction and safe to share between threads.

    Attributes:
        vocab_size: number of tokens.
        bos_id, eos_id: ids, or None where the vocabulary has none.
        add_bos, add_eos: whether the file wants BOS before, EOS after a prompt.
        add_space_prefix: whether text is encoded with a space before it (SentencePiece), which decode() takes off again.
        eog_ids: every token that ends an answer: EOS, EOT, EOM and tokens known by their text, such as ``<|im_end|>``.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    eog_ids: frozenset[int]

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        self._texts = vocabulary.tokens
        self._token_ids = vocabulary.token_ids
        self._types = vocabulary.types
        self.vocab_size = len(self._texts)
        self.bos_id = vocabulary.named_ids.get("tokenizer.ggml.bos_token_id")
        self.eos_id = vocabulary.named_ids.get("tokenizer.ggml.eos_token_id")
        self._is_bpe = vocabulary.model == "gpt2"
        rule: PreTokenizer | None = None
        if self._is_bpe:
            rule = pre_tokenizer(vocabulary.pre)
        self.add_bos = flag(metadata, "tokenizer.ggml.add_bos_token", rule.add_bos if rule else True)
        self.add_eos = flag(metadata, "tokenizer.ggml.add_eos_token", False)
        self.add_space_prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", True) and not self._is_bpe

        ends, control, plain = end_of_generation(self._token_ids, vocabulary.named_ids)
        self.eog_ids = frozenset(ends)
        kinds = self._types
        kinds[list(control)] = CONTROL
        kinds[list(plain)] = USER_DEFINED
        self._control = frozenset(np.flatnonzero(kinds == CONTROL).tolist())
        self._silent = self._control | frozenset(np.flatnonzero(kinds == UNKNOWN).tolist())
        user_defined = np.flatnonzero(kinds == USER_DEFINED).tolist()
        # User-defined tokens are found in plain text too; control tokens only where the caller trusts the text.
        self._plain_splitter = SpecialSplitter({self._texts[i]: i for i in user_defined})
        self._splitter = SpecialSplitter({self._texts[i]: i for i in sorted([*user_defined, *self._silent])})

        self._rule = rule
        if rule is not None:
            self._bpe = BytePairEncoder(self._token_ids, vocabulary.merges, ignore_merges=rule.ignore_merges)
        else:
            hidden = np.zeros(self.vocab_size, bool)
            hidden[list(self._silent)] = True
            self._spm = SentencePieceEncoder(
                self._texts, vocabulary.scores, hidden, vocabulary.byte_tokens, vocabulary.unknown_id
            )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata describes.

        Args:
            metadata: key → value; string arrays are ``list[str]``, numeric arrays NumPy arrays.

        Raises:
            TokenizerError: the tokenizer model is not supported, or the vocabulary is incomplete or contradicts itself.
        """
        return cls(Vocabulary.from_gguf(metadata), metadata)

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text; lone surrogates become U+FFFD.
            special: whether control tokens written in the text become control tokens. False for text that is not trusted;
                user-defined tokens are found either way.
            bos: whether BOS comes first; None = as the file says (``add_bos``). A rendered chat template has its own BOS.

        Raises:
            TokenizerError: ``bos=True`` with a vocabulary that has no BOS.
        """
        ids: list[int] = []
        if bos is None:
            bos = self.add_bos and self.bos_id is not None
        if bos:
            if self.bos_id is None:
                raise TokenizerError("this vocabulary has no BOS token; encode with bos=False")
            ids.append(self.bos_id)
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        after_special = True
        for part in (self._splitter if special else self._plain_splitter).split(text):
            if isinstance(part, int):
                ids.append(part)
            elif self._rule is not None:
                ids += self._bpe.encode(self._rule.split(part))
            else:
                ids += self._spm.encode(" " + part if self.add_space_prefix and after_special else part)
            after_special = isinstance(part, int)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: whether control tokens are written out; they are left out otherwise.

        Raises:
            TokenizerError: an id outside of the vocabulary.
        """
        data = b"".join([self.piece(i, special=special) for i in ids])
        return self.strip_prefix(data).decode("utf-8", "replace")

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes that a token adds to a text: nothing for a control or unknown token, unless ``special``."""
        if not special and token_id in self._silent:
            return b""
        return self.token_bytes(token_id)

    def strip_prefix(self, data: bytes) -> bytes:
        """``data``, the start of a decoded text, without the space that encode() put there."""
        return data[1:] if self.add_space_prefix and data[:1] == b" " else data

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, control tokens included; none for a token that the file calls unused.

        Raises:
            TokenizerError: the id is outside of the vocabulary.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {}

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside of the vocabulary (0 to {self.vocab_size - 1})")
        text = self._texts[token_id]
        kind = self._types[token_id]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == NORMAL:
            if self._is_bpe:
                return decode_byte_alphabet(text)
            text = text.replace(SPACE, " ")
        elif kind not in (CONTROL, UNKNOWN, USER_DEFINED):
            return b""  # padding of the vocabulary, such as <unused7>
        return text.encode("utf-8", "surrogateescape")

    def token_text(self, token_id: int) -> str:
        """The token as the file writes it (GPT-2's alphabet, ``▁`` for a space): for display and for chat templates."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside of the vocabulary (0 to {self.vocab_size - 1})")
        return self._texts[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and is no text, such as ``<|im_start|>``."""
        return token_id in self._control

    def __repr__(self) -> str:
        return f"Tokenizer({'gpt2' if self._is_bpe else 'llama'}, {self.vocab_size} tokens)"
