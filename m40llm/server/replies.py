"""Pieces of replies that several routes share: usage, timings, log-probabilities."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from m40llm.generation import GenerationResult
from m40llm.sampling import TokenLogprobs
from m40llm.text import Tokenizer


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(results: Sequence[GenerationResult], per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's usage; a prompt with several choices (`per_prompt` in a row) counts once."""
    firsts = results[::per_prompt]
    prompt = sum(r.prompt_tokens for r in firsts)
    completion = sum(r.generated_tokens for r in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in firsts)},
    }


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """llama-server's names; milliseconds and tokens per second.

    Of several generations, which run side by side, the tokens of all and the times of the slowest.
    """
    each = [result.timings for result in results]
    prompt_s, predicted_s = max(t.prefill_s for t in each), max(t.decode_s for t in each)
    prompt_n = sum(t.prefill_tokens for t in each)
    timed = sum(t.decode_tokens for t in each)  # without each one's first, which the prompt's time covers
    return {
        "cache_n": sum(result.cached_tokens for result in results),
        "queued_ms": _ms(max(t.queued_s for t in each)),
        "prompt_n": prompt_n,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": _ms(_ratio(prompt_s, prompt_n)),
        "prompt_per_second": round(_ratio(prompt_n, prompt_s), 3),
        "predicted_n": sum(result.generated_tokens for result in results),
        "predicted_ms": _ms(predicted_s),
        "predicted_per_token_ms": _ms(_ratio(predicted_s, timed)),
        "predicted_per_second": round(_ratio(timed, predicted_s), 3),
    }


def _ratio(value: float, per: float) -> float:
    return value / per if per > 0 else 0.0


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content = []
    for entry in entries:
        top = [_token(tokenizer, token, logprob) for token, logprob in entry.top]
        content.append({**_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class TextLogprobs:
    """`choices[].logprobs` of one text completion, chunk by chunk; `offset` is where the first token's text begins."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens'. A token's offset counts the characters that are complete before it."""
        tokens, chosen, top, offsets = [], [], [], []
        for entry in entries:
            tokens.append(self._name(entry.token_id))
            chosen.append(entry.logprob)
            top.append({self._name(token): logprob for token, logprob in entry.top})
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(entry.token_id)))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        """A token's text; for a piece of a character OpenAI's `bytes:` and hexadecimal: as U+FFFD it would be like any other."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
