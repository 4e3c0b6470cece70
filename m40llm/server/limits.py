"""A prompt that cannot fit is refused before it is tokenized: megabytes of it would slow down everybody's answers."""

from __future__ import annotations

from m40llm.engine import RequestError
from m40llm.text import Tokenizer


class PromptLimit:
    """Knows the least number of tokens that a text can have: no token covers more bytes than the vocabulary's longest."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._longest = max(1, max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
        self._context = context

    def check(self, text: str) -> None:
        """Raises RequestError if `text` has more tokens than the context holds, however it is tokenized."""
        at_least = len(text) // self._longest  # characters: never more than bytes
        if at_least >= self._context:
            raise RequestError(
                f"the prompt has at least {at_least} tokens, but the context of {self._context} must also have room for an "
                "answer; shorten the prompt or raise --ctx-per-slot"
            )
