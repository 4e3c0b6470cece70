"""Grammars over a model's vocabulary, compiled by llguidance: JSON schemas and Lark rules to `Constraint`s."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from m40llm.sampling.constraint import GrammarConstraint
from m40llm.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# One space, or a line break with indentation: what models write, but no place where a weak one can circle for ever.
_WHITESPACE = r"( |\n {0,16})?"


class GrammarError(ValueError):
    """A grammar or JSON schema that cannot be compiled; the message says which part and why."""


class Grammar:
    """A compiled grammar; `start` gives every request its own walk through it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads; the vocabulary is handed over on first use.

    Args:
        tokenizer: the vocabulary. Control tokens are never text: a grammar reaches them by id only (``<[id]>``).
        vocab_size: V of the logits, which may be padded beyond the vocabulary; padding is never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, lark: str) -> Grammar:
        """Compiles a Lark grammar in llguidance's dialect (its docs/syntax.md); ``start`` is the first rule.

        Raises:
            GrammarError: the grammar, or a schema in it, is wrong, not supported or over llguidance's limits.
        """
        from llguidance import LLMatcher  # 20 ms and a shared library that a request without a grammar does without

        matcher = LLMatcher(self._ready(), lark, log_level=0)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        if not any(matcher.compute_bitmask()) or matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()) or "no text can satisfy it")
        return Grammar(matcher)

    def compile_json(self, schema: Any = None) -> Grammar:
        """A JSON text that satisfies ``schema``; None: any JSON object.

        Raises:
            GrammarError: see `compile`; also for a keyword that llguidance does not implement.
        """
        return self.compile(f"start: {json_rule({'type': 'object'} if schema is None else schema)}")

    def _ready(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary


def json_rule(schema: Any) -> str:
    """``schema`` (an object or a boolean) as a term of a Lark rule. Raises GrammarError for another type."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object, not {type(schema).__name__}")
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be written as JSON: {error}") from error


class _Words:
    """The vocabulary in the shape that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = [i for i in range(known) if tokenizer.is_control(i)]
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, special=False, bos=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(i for i in tokenizer.eog_ids if i < vocab_size)
    if not ends:
        raise GrammarError("this model has no end-of-generation token, which constrained output needs")
    words = TokenizerWrapper(_Words(tokenizer, vocab_size))
    return LLTokenizer(words, n_vocab=vocab_size, eos_token=ends, slices=LLTokenizer.json_slices())


def _reason(message: str) -> str:
    """llguidance's error without the grammar that it quotes, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:300]
