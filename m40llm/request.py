"""What a request may ask of the engine, and what it is told when it asks for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from m40llm.config import SamplingParams
from m40llm.kv.prefix_cache import CacheError, PrefixCache
from m40llm.sampling import Constraint

# A request meets this limit on the command line and over HTTP, where the option has another name.
LARGER_CONTEXT = "raise --ctx (serve: --ctx-per-slot)"


class RequestError(ValueError):
    """A request that cannot run; the message names the problem and the remedy. Nothing was computed for it."""


class EngineClosed(RuntimeError):
    """The engine is shutting down, or broke, and takes no more requests."""


class QueueFull(RuntimeError):
    """As many requests wait as may. Nothing of this one was taken; it may be tried again later."""


class Request(NamedTuple):
    """What `submit_all` takes several of: token ids of the prompt, and how to continue it.

    `constraint` restricts the output's tokens and is this request's own; `written` are control tokens that the text shows.
    When it ends, what it computed becomes the cache entry `cache_id`; `prefix_cache_ids`, most specific first, are entries
    that the prompt may continue and that are still in use.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    constraint: Constraint | None = None
    written: frozenset[int] = frozenset()
    cache_id: str | None = None
    prefix_cache_ids: tuple[str, ...] = ()


def checked_max_tokens(request: Request, vocab_size: int, context: int) -> int:
    """How many tokens the request may generate. Raises RequestError when it cannot run as asked."""
    prompt_ids, params = request.prompt_ids, request.params
    if request.constraint is not None and params.ignore_eos:
        raise RequestError("ignore_eos cannot be combined with constrained output, which ends when it is complete")
    n = len(prompt_ids)
    if n == 0:
        raise RequestError("the prompt is empty; give at least one token")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise RequestError(f"the prompt has a token id outside the vocabulary of {vocab_size}")
    room = context - n
    if room < 1:
        raise RequestError(
            f"the prompt has {n} tokens, but the context of {context} must also have room for an answer; "
            f"shorten the prompt or {LARGER_CONTEXT}"
        )
    if params.max_tokens is None:
        return room
    if params.max_tokens > room:
        raise RequestError(
            f"prompt ({n} tokens) + max_tokens ({params.max_tokens}) exceed the context of {context}; "
            f"lower max_tokens or {LARGER_CONTEXT}"
        )
    return params.max_tokens


def checked_cache_id(request: Request, cache: PrefixCache | None) -> str | None:
    """The name of the entry that the request becomes; the entries that it continues are marked as in use.

    Raises:
        RequestError: a name is not one, or there is no cache.
    """
    if request.cache_id is None and not request.prefix_cache_ids:
        return None
    if cache is None:
        raise RequestError("there is no prefix cache to name entries in; give --cache-ram-mb or --cache-disk-dir")
    own = () if request.cache_id is None else (request.cache_id,)
    try:
        for names in (request.prefix_cache_ids, own):
            cache.select(names, request.prompt_ids)
    except CacheError as error:
        raise RequestError(str(error)) from None
    return request.cache_id


def warm_request(
    token_ids: Sequence[int], cache_id: str, cache: PrefixCache | None, vocab_size: int, context: int
) -> Request:
    """The request that brings a prefix into the cache; its one sampled token means nothing.

    Raises:
        RequestError: it cannot run, there is no cache, or the name is not one.
        CacheError: the tokens would shrink or replace a live entry, or do not fit beside the live ones.
    """
    request = Request(token_ids, SamplingParams(max_tokens=1, temperature=0.0), cache_id=cache_id)
    checked_max_tokens(request, vocab_size, context)
    checked_cache_id(request, cache)
    assert cache is not None
    cache.check_warm(cache_id, token_ids)
    return request
