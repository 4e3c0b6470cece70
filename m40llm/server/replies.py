"""Pieces of replies that several routes share: usage, timings, log-probabilities."""

from __future__ import annotations

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


def timings(result: GenerationResult) -> dict[str, Any]:
    """llama-server's names; milliseconds and tokens per second."""
    t = result.timings
    return {
        "cache_n": result.cached_tokens,
        "queued_ms": _ms(t.queued_s),
        "prompt_n": t.prefill_tokens,
        "prompt_ms": _ms(t.prefill_s),
        "prompt_per_token_ms": _ms(t.prefill_s / t.prefill_tokens) if t.prefill_tokens else 0.0,
        "prompt_per_second": round(t.prefill_tok_s, 3),
        "predicted_n": result.generated_tokens,
        "predicted_ms": _ms(t.decode_s),
        "predicted_per_token_ms": _ms(t.decode_s / t.decode_tokens) if t.decode_tokens else 0.0,
        "predicted_per_second": round(t.decode_tok_s, 3),
    }


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


def text_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of text completions; `offset` is where the first token's text begins."""
    tokens, chosen, top, offsets = [], [], [], []
    for entry in entries:
        text = _text(tokenizer, entry.token_id)
        tokens.append(text)
        chosen.append(entry.logprob)
        top.append({_text(tokenizer, token): logprob for token, logprob in entry.top})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
