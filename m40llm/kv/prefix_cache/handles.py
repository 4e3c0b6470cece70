"""Named entries: a `cache_id` keeps one chain from being evicted for as long as its session is live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from m40llm.kv.prefix_cache.keys import TOKEN_BYTES, Key, encode_tokens

MAX_HANDLES = 4096
MAX_ID_LENGTH = 128


class CacheError(ValueError):
    """A request to the cache that it refuses; the message says why and what to do instead."""


class UnknownCacheId(CacheError):
    """There is no entry of that name."""


@dataclass(slots=True)
class Handle:
    """One entry. `keys` are pinned while `live`."""

    cache_id: str
    tokens: bytes
    keys: tuple[Key, ...]
    used: float
    live: bool

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def check_cache_id(cache_id: str) -> str:
    """Returns it. Raises CacheError for an empty, long or unprintable one."""
    if not 1 <= len(cache_id) <= MAX_ID_LENGTH or not cache_id.isprintable():
        raise CacheError(f"a cache_id has 1 to {MAX_ID_LENGTH} printable characters; this one has {len(cache_id)}")
    return cache_id


class Handles:
    """Entries by name. An entry is live for `live_seconds` after its last use; then its blocks may go.

    Args:
        pins: how often each key is pinned, here and elsewhere.
        clock: seconds, monotonic.
    """

    def __init__(self, pins: Counter[Key], live_seconds: float, clock: Callable[[], float]) -> None:
        self._pins = pins
        self._live_seconds = live_seconds
        self._clock = clock
        self._handles: dict[str, Handle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[Handle]:
        return iter(list(self._handles.values()))

    def get(self, cache_id: str) -> Handle | None:
        return self._handles.get(cache_id)

    def check_growth(self, cache_id: str, tokens: Sequence[int]) -> None:
        """Raises CacheError when `tokens` would shrink or replace a live entry."""
        self.expire()
        handle = self._handles.get(check_cache_id(cache_id))
        if handle is not None and handle.live and not encode_tokens(tokens).startswith(handle.tokens):
            raise CacheError(
                f"cache entry '{cache_id}' is live with {handle.n_tokens} tokens, and these {len(tokens)} do not "
                "continue them; evict it first or use another cache_id"
            )

    def bind(self, cache_id: str, tokens: bytes, keys: Sequence[Key]) -> None:
        """Lets the name stand for this chain. A live entry that starts with these tokens stays as it is, but young.

        Raises:
            CacheError: the name is not one, or all `MAX_HANDLES` entries are live.
        """
        self.expire()
        handle = self._handles.get(check_cache_id(cache_id))
        if handle is not None and handle.live and len(handle.tokens) > len(tokens) and handle.tokens.startswith(tokens):
            handle.used = self._clock()
            return
        if handle is None and len(self._handles) >= MAX_HANDLES:
            self._forget_oldest()
        self._pins.update(keys)
        if handle is not None:
            self._release(handle)
        self._handles[cache_id] = Handle(cache_id, tokens, tuple(keys), self._clock(), live=True)

    def use(self, cache_id: str) -> None:
        """The entry's session is alive. Unknown names are ignored: their blocks were not kept."""
        handle = self._handles.get(cache_id)
        if handle is not None:
            handle.used = self._clock()
            if not handle.live:
                handle.live = True
                self._pins.update(handle.keys)

    def remove(self, cache_id: str) -> Handle:
        """Raises UnknownCacheId."""
        handle = self._handles.pop(cache_id, None)
        if handle is None:
            raise UnknownCacheId(f"there is no cache entry '{cache_id}'")
        self._release(handle)
        return handle

    def expire(self) -> None:
        """Unpins entries that nobody used for `live_seconds`."""
        limit = self._clock() - self._live_seconds
        for handle in self._handles.values():
            if handle.live and handle.used < limit:
                self._release(handle)

    def _release(self, handle: Handle) -> None:
        if handle.live:
            handle.live = False
            unpin(self._pins, handle.keys)

    def _forget_oldest(self) -> None:
        idle = [h for h in self._handles.values() if not h.live]
        if not idle:
            raise CacheError(f"all {MAX_HANDLES} cache entries are live; evict one first")
        self.remove(min(idle, key=lambda h: h.used).cache_id)


def unpin(pins: Counter[Key], keys: Sequence[Key]) -> None:
    """Takes one pin from each key; a key without pins is not in the counter."""
    for key in keys:
        pins[key] -= 1
        if pins[key] <= 0:
            del pins[key]
