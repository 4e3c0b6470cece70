"""EngineCache: where the scheduler's slots, the session's KV and the prefix cache meet. The engine's thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from m40llm.config import ConfigError, RuntimeOptions
from m40llm.kv.prefix_cache import CacheError, CacheIdentity, PrefixCache
from m40llm.kv.transfer import CacheTraffic
from m40llm.scheduler import ScheduledStep, Scheduler, Sequence
from m40llm.session import DecodeSession

_log = logging.getLogger(__name__)


def open_cache(identity: CacheIdentity, options: RuntimeOptions) -> PrefixCache | None:
    """The cache that the options ask for, if any. Raises ConfigError: its folder cannot be used."""
    if not options.cache_ram_mb and options.cache_disk_dir is None:
        return None
    try:
        return PrefixCache(
            identity,
            ram_bytes=options.cache_ram_mb << 20,
            disk_dir=options.cache_disk_dir,
            disk_bytes=options.cache_disk_mb << 20,
        )
    except OSError as error:
        raise ConfigError(f"--cache-disk-dir {options.cache_disk_dir} cannot be used ({error})") from error


class EngineCache:
    """The scheduler's `SlotEvents`: fills slots from the cache when a sequence comes and saves what it leaves behind.

    Args:
        cache: None: only what lies in the slots themselves is reused.
        wake: keeps the engine from sleeping; called from other threads when a block has come from disk.
    """

    def __init__(self, cache: PrefixCache | None, session: DecodeSession, wake: Callable[[], None]) -> None:
        self.scheduler: Scheduler  # set once by whoever makes both
        self._session = session
        self._cache = cache
        self._traffic = None if cache is None else CacheTraffic(cache, session, wake)

    # -- told by the scheduler -----------------------------------------------------------------------
    def admitted(self, sequence: Sequence) -> None:
        if self._traffic is None:
            return
        self.make_copies()  # the slot may be the source of one
        self._traffic.settle(sequence.slot)
        sequence.loading = self._traffic.load(
            sequence.slot,
            sequence.tokens,
            have=sequence.num_computed,
            beyond=max(sequence.num_computed, sequence.shared if sequence.leader is not None else 0),
            arrived=partial(_arrived, sequence),
        )

    def leaving(self, sequence: Sequence, *, keep_kv: bool) -> None:
        if self._traffic is None:
            return
        self.make_copies()
        if keep_kv:
            self._traffic.end(sequence.slot, sequence.tokens, sequence.num_computed)
        else:
            self._traffic.drop(sequence.slot)

    # -- between steps -------------------------------------------------------------------------------
    def make_copies(self) -> None:
        """Slot to slot, as the scheduler has decided."""
        for copy in self.scheduler.take_copies():
            self._session.copy_kv(copy.source, copy.target, copy.start, copy.stop)

    def advance(self) -> bool:
        """Moves a few blocks to and from the cache; True when there are more to move at once."""
        self.make_copies()
        return self._traffic is not None and self._traffic.advance()

    def computed(self, step: ScheduledStep) -> None:
        """A step was committed: its full blocks may be saved."""
        if self._traffic is not None:
            for sequence in step.sequences:
                if sequence.slot >= 0:
                    self._traffic.save(sequence.slot, sequence.tokens, sequence.num_computed)

    def name(self, cache_id: str, sequence: Sequence) -> None:
        """Lets an entry stand for what was computed of a sequence that ends."""
        if self._cache is None or sequence.num_computed == 0:
            return
        try:
            self._cache.bind(cache_id, sequence.tokens[: sequence.num_computed])
        except CacheError as error:  # every entry is live: the answer is as good without a name
            _log.warning("prefix cache: no entry '%s': %s", cache_id, error)

    def settle(self) -> None:
        """Saves what ended sequences have left in their slots."""
        if self._traffic is not None:
            self._traffic.settle_ended()

    def close(self) -> None:
        """Saves what is left in the slots; the cache itself is the owner's to close."""
        if self._traffic is not None:
            self._traffic.finish()


def _arrived(sequence: Sequence, stop: int, last: bool) -> None:
    if last:
        sequence.loading = False
    else:
        sequence.reuse(stop)
