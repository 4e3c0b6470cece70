"""From a rendered conversation to token ids, with BOS exactly once where the model wants it."""

from __future__ import annotations

from m40llm.text.tokenizer import Tokenizer


def rendered_ids(tokenizer: Tokenizer, rendered: str) -> list[int]:
    """Ids of a prompt that a chat template wrote: some templates write BOS themselves, others leave it to the tokenizer."""
    ids = tokenizer.encode(rendered, bos=False)
    wants_bos = tokenizer.add_bos and tokenizer.bos_id is not None
    return [tokenizer.bos_id, *ids] if wants_bos and ids[:1] != [tokenizer.bos_id] else ids  # type: ignore[list-item]
