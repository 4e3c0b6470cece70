"""CacheTraffic: moves blocks between the slots' KV and the prefix cache, a few between two steps, so that no step waits long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray

from m40llm.kv.prefix_cache.cache import Load, PrefixCache
from m40llm.kv.prefix_cache.keys import BLOCK_TOKENS, Key, block_key, encode_tokens

# Blocks moved between two steps: as many as a prefill chunk of 512 tokens makes, a few milliseconds of copying.
BLOCKS_PER_STEP = 8


class SlotMemory(Protocol):
    """The KV of the slots. Blocks are host arrays (2, L, n, KH, HD) in the KV's storage type, K first."""

    def read_kv(self, slot: int, start: int, stop: int) -> NDArray:
        """A copy of positions `start .. stop` of a slot."""

    def write_kv(self, slot: int, start: int, data: NDArray) -> None:
        """Overwrites positions from `start` on."""


@dataclass(slots=True)
class _Save:
    """What a slot holds and how much of it is in the cache. `tokens` may grow, its first `computed` do not change."""

    tokens: Sequence[int]
    parent: Key
    computed: int = 0
    saved: int = 0
    ended: bool = False  # then the incomplete last block is saved too
    refused: bool = False

    @property
    def due(self) -> int:
        """Tokens of the next block to save; 0: none is ready."""
        if self.refused:
            return 0
        n = min(self.computed - self.saved, BLOCK_TOKENS)
        return n if n == BLOCK_TOKENS or self.ended else 0


@dataclass(slots=True)
class _Loading:
    load: Load
    arrived: Callable[[int, bool], None]


class CacheTraffic:
    """Belongs to the engine's thread. KV of computed positions never changes while a sequence runs, so its full blocks are
    saved during the run; at its end only few are left, and they are saved while the slot lies free.

    Args:
        wake: makes the owner call `advance` soon; called from other threads when a block has come from disk.
    """

    def __init__(
        self, cache: PrefixCache, memory: SlotMemory, wake: Callable[[], None], blocks_per_step: int = BLOCKS_PER_STEP
    ) -> None:
        self.cache = cache
        self._memory = memory
        self._wake = wake
        self._blocks_per_step = blocks_per_step
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Loading] = {}

    def load(
        self, slot: int, tokens: Sequence[int], have: int, beyond: int, arrived: Callable[[int, bool], None]
    ) -> bool:
        """Starts to bring what is cached of `tokens` into a slot that holds their first `have`.

        Args:
            beyond: not worth it unless the cache reaches further than this position.
            arrived: called by `advance` with (positions that the slot now holds, whether that was all).

        Returns:
            Whether anything comes; `arrived` is called with True exactly once then, unless `drop` comes first.
        """
        load = self.cache.open_load(tokens, have, beyond, self._wake)
        if load is None:
            return False
        self._loads[slot] = _Loading(load, arrived)
        self._wake()  # `advance` has work, and the engine may be about to sleep for want of a step
        return True

    def save(self, slot: int, tokens: Sequence[int], computed: int) -> None:
        """The slot now holds the KV of the first `computed` of `tokens`."""
        save = self._saves.get(slot)
        if save is None:
            save = self._saves[slot] = _Save(tokens, self.cache.identity.root)
        save.computed = computed

    def end(self, slot: int, tokens: Sequence[int], computed: int) -> None:
        """The slot's sequence has ended; what it holds is kept."""
        self.drop_load(slot)
        self.save(slot, tokens, computed)
        self._saves[slot].ended = True

    def drop(self, slot: int) -> None:
        """The slot's content is not to be trusted."""
        self.drop_load(slot)
        self._saves.pop(slot, None)

    def drop_load(self, slot: int) -> None:
        """Stops bringing blocks into a slot; those that it has are good."""
        loading = self._loads.pop(slot, None)
        if loading is not None:
            loading.load.close()

    def settle(self, slot: int) -> None:
        """Saves now what is left of a slot that is about to be overwritten."""
        save = self._saves.pop(slot, None)
        while save is not None and save.due:
            self._save_block(slot, save)

    def settle_ended(self) -> None:
        """Saves now what is left of the sequences that have ended: a few blocks each."""
        for slot in [slot for slot, save in self._saves.items() if save.ended]:
            self.settle(slot)

    def advance(self) -> bool:
        """Moves some blocks; False when nothing more can be moved before a step or a read ends."""
        left = self._blocks_per_step
        for slot, loading in list(self._loads.items()):
            left = self._advance_load(slot, loading, left)
        for slot, save in list(self._saves.items()):
            while left > 0 and save.due:
                left -= self._save_block(slot, save)
            if save.ended and not save.due:
                del self._saves[slot]
        return left <= 0

    def finish(self) -> None:
        """Saves everything that is left: the engine is about to close."""
        for slot in list(self._loads):
            self.drop_load(slot)
        for slot in list(self._saves):
            self.settle(slot)

    def _advance_load(self, slot: int, loading: _Loading, left: int) -> int:
        load = loading.load
        while left > 0 and not load.finished:
            block = load.next()
            if block is None:
                break
            start, data = block
            self._memory.write_kv(slot, start, data)
            loading.arrived(start + data.shape[2], False)
            left -= 1
        if load.finished:
            self.drop_load(slot)
            loading.arrived(0, True)
        return left

    def _save_block(self, slot: int, save: _Save) -> bool:
        """Saves the next block unless the cache has it; answers whether anything was copied."""
        start, stop = save.saved, save.saved + save.due
        tokens = encode_tokens(save.tokens[start:stop])
        key = block_key(save.parent, tokens)
        copied = not self.cache.holds(key, save.parent, tokens)
        try:
            kept = not copied or self.cache.put(save.parent, tokens, self._memory.read_kv(slot, start, stop))
        except MemoryError:  # the cache's loss, not the request's
            kept = False
        save.refused = not kept  # nothing that builds on it could be kept either
        save.saved, save.parent = stop, key
        return copied
