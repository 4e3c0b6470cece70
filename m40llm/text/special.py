"""Control and user-defined tokens: where they stand in a text, and which of them end an answer.

The rules are llama.cpp's (``src/llama-vocab.cpp``, the oracle for token ids).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Texts that llama.cpp takes for the end of an answer, whatever the file's eos id is.
_END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT>
[EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
"""
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Fill-in-the-middle tokens that end an answer: padding, repository and file separators.
_FIM_END_TEXTS = (
    ("tokenizer.ggml.fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("tokenizer.ggml.fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("tokenizer.ggml.fim_sep_token_id", ("<|file_sep|>",)),
)
# Fill-in-the-middle tokens that llama.cpp takes for control tokens, whatever type the file gives them.
_CONTROL_TEXTS = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix>
<fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID>
▁<MID> <|code_middle|> <|middle|>
"""
_ALWAYS_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # harmony: part of the answer's text


def find_ids(token_ids: dict[str, int], texts: Iterable[str]) -> list[int]:
    """Ids of those ``texts`` that are tokens."""
    return [token_ids[text] for text in texts if text in token_ids]


def end_of_generation(token_ids: dict[str, int], named_ids: dict[str, int]) -> tuple[set[int], set[int], set[int]]:
    """Which tokens end an answer, and which token types their texts override.

    Args:
        token_ids: text → id of the vocabulary.
        named_ids: ``tokenizer.ggml.*_token_id`` of the file (with the tokenizer model's defaults), in range.

    Returns:
        (ids that end an answer, ids that are control tokens by their text, ids that are text whatever the file says)
    """
    ends = set(find_ids(token_ids, _END_TEXTS.split()))
    control = set(ends) | set(find_ids(token_ids, _CONTROL_TEXTS.split()))
    for key, texts in _FIM_END_TEXTS:
        found = [named_ids[key]] if key in named_ids else find_ids(token_ids, texts)[:1]
        ends.update(found)
        if key not in named_ids:
            control.update(found)
    ends.update(named_ids[key] for key in _END_KEYS if key in named_ids)
    text = set(find_ids(token_ids, _ALWAYS_TEXT))
    # harmony and solar-open: <|end|> closes a message, not the answer
    end = token_ids.get("<|end|>")
    calls = "<|call|>" in token_ids or "<|calls|>" in token_ids
    if end in ends and calls and ("<|return|>" in token_ids or "<|flush|>" in token_ids):
        ends.discard(end)
        text.add(end)
    # gemma 4: </s> is a normal token
    if "<|tool_response>" in token_ids and "</s>" in token_ids:
        ends.discard(token_ids["</s>"])
        text.add(token_ids["</s>"])
    return ends, control - text, text


class SpecialSplitter:
    """Cuts a text at special tokens as llama.cpp does: the longest token claims its places first, each from the left.

    Args:
        texts: text → id of the tokens to find; equally long ones claim in the order given.
    """

    def __init__(self, texts: dict[str, int]) -> None:
        self._ids = texts
        self._priority = {
            text: n for n, text in enumerate(sorted(texts, key=lambda t: -len(t.encode("utf-8", "replace"))))
        }
        # Keyed by the first two characters: spaces and "<" start many tokens, but rarely with what follows in a text.
        by_start: dict[str, set[int]] = {}
        for text in texts:
            by_start.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(lengths, reverse=True) for start, lengths in by_start.items()}
        starts = "".join(map(re.escape, sorted({text[0] for text in texts})))
        self._starts = re.compile(f"[{starts}]") if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Ids of the special tokens in ``text`` and the pieces of text around them, in order; no piece is empty."""
        start = 0
        for position, special in self._claims(text):
            if position > start:
                yield text[start:position]
            yield self._ids[special]
            start = position + len(special)
        if start < len(text):
            yield text[start:]

    def _claims(self, text: str) -> list[tuple[int, str]]:
        """(position, token) in order. The longest token from the left, except where a later one has priority over it."""
        if self._starts is None:
            return []
        claims: list[tuple[int, str]] = []
        resume = 0
        for match in self._starts.finditer(text):
            position = match.start()
            if position < resume:
                continue
            token = self._longest(text, position)
            if not token:
                continue
            resume = position + len(token)
            if self._is_contested(text, position, token):
                cluster, resume = self._resolve(text, position, resume)
                claims += cluster
            else:
                claims.append((position, token))
        return claims

    def _longest(self, text: str, position: int) -> str:
        for length in self._lengths.get(text[position : position + 2], ()):
            token = text[position : position + length]
            if token in self._ids:
                return token
        return text[position] if text[position] in self._ids else ""

    def _is_contested(self, text: str, position: int, token: str) -> bool:
        """Whether a token that starts inside of ``token`` claims its place first."""
        rank = self._priority[token]
        for inner in range(position + 1, position + len(token)):
            other = self._longest(text, inner)
            if other and self._priority[other] < rank and inner + len(other) > position + len(token):
                return True
        return False

    def _resolve(self, text: str, position: int, end: int) -> tuple[list[tuple[int, str]], int]:
        """Claims among the tokens that overlap, one after the other, from ``position`` on; and where they end."""
        found: list[tuple[int, str]] = []
        at = position
        while at < end:
            lengths = {1, *self._lengths.get(text[at : at + 2], ())}
            here = [(at, text[at : at + n]) for n in lengths if text[at : at + n] in self._ids and at + n <= len(text)]
            found += here
            end = max([end, *(at + len(token) for _, token in here)])
            at += 1
        claimed: list[tuple[int, str]] = []
        taken = bytearray(end - position)
        for at, token in sorted(found, key=lambda item: (self._priority[item[1]], item[0])):
            start, stop = at - position, at - position + len(token)
            if not any(taken[start:stop]):
                taken[start:stop] = b"\1" * len(token)
                claimed.append((at, token))
        return sorted(claimed), end
