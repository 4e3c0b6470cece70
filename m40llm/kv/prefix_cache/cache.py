"""PrefixCache: the blocks of past prompts in host RAM and on disk, found by the tokens that lead to them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from m40llm.kv.prefix_cache.block_file import BlockHeader
from m40llm.kv.prefix_cache.disk import DiskTier
from m40llm.kv.prefix_cache.handles import CacheError, Handles, check_cache_id, unpin
from m40llm.kv.prefix_cache.identity import CacheIdentity
from m40llm.kv.prefix_cache.index import ChainIndex, Node
from m40llm.kv.prefix_cache.keys import BLOCK_TOKENS, TOKEN_BYTES, Key, block_key, encode_tokens

# Keys, tokens and Python's own share of a block in RAM, so that many tiny blocks cannot slip under the budget.
NODE_BYTES = 1024
LIVE_SECONDS = 900.0
# Blocks read ahead of the one that is waited for: more than are moved between two steps, so that the disk works during a step.
_READ_AHEAD = 16
_STRIDE = BLOCK_TOKENS * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `start .. stop` of a prompt, the first ones of the block `key`."""

    key: Key
    start: int
    stop: int


class PrefixCache:
    """Blocks of `BLOCK_TOKENS` tokens in two tiers. Methods may be called from any thread; none waits for the disk but
    `flush` and `close`.

    Args:
        ram_bytes: budget of the RAM tier; 0 switches it off.
        disk_dir: folder of the disk tier; None switches it off.
        disk_bytes: budget of that folder.
        live_seconds: how long an unused named entry keeps its blocks from being evicted.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        identity: CacheIdentity,
        *,
        ram_bytes: int,
        disk_dir: Path | None = None,
        disk_bytes: int = 0,
        live_seconds: float = LIVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._lock = threading.RLock()
        self._pins: Counter[Key] = Counter()
        self._handles = Handles(self._pins, live_seconds, clock)
        self._ram: ChainIndex[NDArray] = ChainIndex(identity.root, ram_bytes, self._pins)
        self._disk: DiskTier | None = None
        if disk_dir is not None:
            self._disk = DiskTier(disk_dir, disk_bytes, identity, self._pins, self._lock)
        self._counts: Counter[str] = Counter()

    @property
    def ram_bytes(self) -> int:
        """In use."""
        return self._ram.nbytes

    @property
    def disk_bytes(self) -> int:
        """In use."""
        return 0 if self._disk is None else self._disk.index.nbytes

    @property
    def written_blocks(self) -> int:
        """To the disk, since the start."""
        return 0 if self._disk is None else self._disk.counters.writes

    # -- finding -----------------------------------------------------------------------------------
    def match(self, tokens: Sequence[int]) -> list[Piece]:
        """The longest cached prefix of `tokens`, block by block; of the last block maybe only its first tokens."""
        with self._lock:
            return self._match(encode_tokens(tokens))

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        """How long that prefix is."""
        pieces = self.match(tokens)
        return pieces[-1].stop if pieces else 0

    def _match(self, tokens: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        parent, at = self.identity.root, 0
        while at + _STRIDE <= len(tokens):
            block = tokens[at : at + _STRIDE]
            key = block_key(parent, block)
            in_ram = self._ram.find(key, parent, block) is not None
            if not in_ram and (self._disk is None or not self._disk.find(key, parent, block)):
                break
            pieces.append(Piece(key, at // TOKEN_BYTES, (at + _STRIDE) // TOKEN_BYTES))
            parent, at = key, at + _STRIDE
        rest = tokens[at : at + _STRIDE]
        child, shared = self._ram.longest_child(parent, rest)
        if self._disk is not None:
            on_disk, more = self._disk.index.longest_child(parent, rest)
            if more > shared:
                child, shared = on_disk, more  # type: ignore[assignment]  # only the key matters
        if child is not None:
            pieces.append(Piece(child.key, at // TOKEN_BYTES, at // TOKEN_BYTES + shared))
        return pieces

    def open_load(self, tokens: Sequence[int], have: int, beyond: int, wake: Callable[[], None]) -> Load | None:
        """Starts to fetch what is cached of `tokens` after position `have`; None if that does not reach beyond `beyond`.

        The last token is never loaded: its logits are wanted. `wake` is called from another thread when a block has
        arrived from disk. Close the result.
        """
        with self._lock:
            pieces = self._match(encode_tokens(tokens[:-1]))
            if not pieces or pieces[-1].stop <= beyond:
                self._counts["misses"] += not pieces
                return None
            keys = [piece.key for piece in pieces]
            self._pins.update(keys)
            self._ram.touch(keys[-1])
            self._counts["hits"] += 1
        return Load(self, [p for p in pieces if p.stop > have], keys, have, wake)

    def fetch(self, key: Key) -> NDArray | Future[NDArray | None] | None:
        """A block from RAM, or its coming from disk; None if it is gone."""
        with self._lock:
            node = self._ram.get(key)
            if node is not None:
                return node.payload
        return None if self._disk is None else self._disk.read(key)

    def promote(self, key: Key, data: NDArray) -> None:
        """Takes a block that came from disk into RAM."""
        with self._lock:
            node = self._disk.index.get(key) if self._disk is not None else None
            if node is not None:
                self._add_to_ram(BlockHeader(key, node.parent, node.tokens), data)

    def unpin(self, keys: Sequence[Key]) -> None:
        with self._lock:
            unpin(self._pins, keys)

    def count_loaded(self, tokens: int, tier: str) -> None:
        self._counts[f"loaded_tokens_{tier}"] += tokens

    # -- keeping -----------------------------------------------------------------------------------
    def holds(self, key: Key, parent: Key, tokens: bytes) -> bool:
        """Whether `put` of this block would change nothing; marks it as used."""
        with self._lock:
            if self._disk is not None and not self._disk.holds(key) and not self._on_disk_covered(parent, tokens):
                return False
            if self._ram.budget == 0:
                return self._disk is not None and self._disk.find(key, parent, tokens)
            if self._ram.find(key, parent, tokens) is not None:
                self._ram.touch(key)
                return True
            covered = self._ram.covered(parent, tokens)
            if covered is not None:
                self._ram.touch(covered.key)
            return covered is not None

    def _on_disk_covered(self, parent: Key, tokens: bytes) -> bool:
        return self._disk is not None and self._disk.index.covered(parent, tokens) is not None

    def put(self, parent: Key, tokens: bytes, data: NDArray) -> bool:
        """Keeps a block; the cache owns `data`, (2, L, n, KH, HD), from now on. False: no tier has room or its parent."""
        expected = self.identity.block_shape(len(tokens) // TOKEN_BYTES)
        if data.shape != expected or data.dtype != self.identity.storage:
            raise ValueError(
                f"a block of {data.dtype} {data.shape}; this cache holds {self.identity.storage} {expected}"
            )
        header = BlockHeader(block_key(parent, tokens), parent, tokens)
        with self._lock:
            self._handles.expire()
            kept = self._add_to_ram(header, data)
            self._counts["refused"] += not kept and self._ram.budget > 0
        if self._disk is not None:
            kept = self._disk.write_later(header, data) or kept
        return kept

    def _add_to_ram(self, header: BlockHeader, data: NDArray) -> bool:
        ram = self._ram
        nbytes = data.nbytes + NODE_BYTES
        if header.key in ram:
            ram.touch(header.key)
            return ram.find(header.key, header.parent, header.tokens) is not None
        if header.parent != ram.root and header.parent not in ram:
            return False
        covered = ram.covered(header.parent, header.tokens)
        if covered is not None:
            ram.touch(covered.key)
            return True
        victims = ram.make_room(nbytes, header.parent)
        if victims is None:
            return False
        self._counts["ram_evictions"] += len(victims)
        ram.insert(Node(header.key, header.parent, header.tokens, nbytes, data))
        ram.drop_covered_by(header.parent, header.tokens)
        return True

    # -- named entries -----------------------------------------------------------------------------
    def check_warm(self, cache_id: str, tokens: Sequence[int]) -> None:
        """Raises CacheError when `tokens` may not become the entry `cache_id`: they would shrink or replace a live one, or
        cannot fit beside what is pinned."""
        with self._lock:
            self._handles.check_growth(cache_id, tokens)
            self._check_room(tokens)

    def _check_room(self, tokens: Sequence[int]) -> None:
        blocks = -(-len(tokens) // BLOCK_TOKENS)
        needed = self.identity.block_bytes(len(tokens)) + blocks * NODE_BYTES
        own = {piece.key for piece in self._match(encode_tokens(tokens))}
        pinned = sum(n.nbytes for n in self._ram if n.key in self._pins and n.key not in own)
        budget = self._ram.budget if self._ram.budget or self._disk is None else self._disk.index.budget
        if needed + pinned > budget:
            raise CacheError(
                f"{len(tokens)} tokens need {needed >> 20} MiB of the cache's {budget >> 20} MiB, of which live entries "
                f"hold {pinned >> 20} MiB; evict entries or raise --cache-ram-mb"
            )

    def bind(self, cache_id: str, tokens: Sequence[int]) -> None:
        """Lets `cache_id` stand for the chain of these tokens and pins its blocks, those still to come too.

        Raises:
            CacheError: not a name, or all entries are live.
        """
        encoded = encode_tokens(tokens)
        keys = []
        parent = self.identity.root
        for at in range(0, len(encoded), _STRIDE):
            parent = block_key(parent, encoded[at : at + _STRIDE])
            keys.append(parent)
        with self._lock:
            # the incomplete last block may be here as the start of a longer one
            keys += [piece.key for piece in self._match(encoded) if piece.key not in keys]
            self._handles.bind(cache_id, encoded, keys)

    def select(self, prefix_cache_ids: Sequence[str], tokens: Sequence[int]) -> str | None:
        """The first of these entries (most specific first) that `tokens` continues, marked as used; None if none does."""
        encoded = encode_tokens(tokens)
        with self._lock:
            for cache_id in prefix_cache_ids:
                handle = self._handles.get(check_cache_id(cache_id))
                if handle is not None and encoded.startswith(handle.tokens):
                    self._handles.use(cache_id)
                    return cache_id
        return None

    def evict(self, cache_id: str) -> int:
        """Removes an entry and the blocks that only it needs; returns how many blocks went. Raises UnknownCacheId."""
        with self._lock:
            handle = self._handles.remove(cache_id)
            gone = {node.key for key in reversed(handle.keys) for node in self._ram.drop_branch(key)}
            on_disk = []
            if self._disk is not None:
                on_disk = [node for key in reversed(handle.keys) for node in self._disk.index.drop_branch(key)]
        if self._disk is not None:
            self._disk.forget(on_disk)
        return len(gone | {node.key for node in on_disk})

    def flush(self) -> None:
        """Waits until what is queued for the disk is written, and adds blocks of RAM that the disk was too slow for.

        Nothing on disk is evicted for these.
        """
        if self._disk is None:
            return
        self._disk.flush()
        with self._lock:
            nodes = [node for node in self._ram if not self._disk.holds(node.key)]
        for node in reversed(nodes):  # parents first
            if self._disk.has_free_room(len(node.tokens) // TOKEN_BYTES):
                self._disk.write_later(BlockHeader(node.key, node.parent, node.tokens), node.payload)
                self._disk.flush()  # one at a time: what waits is bounded

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes, counts since the start, and the named entries, ready for JSON."""
        with self._lock:
            self._handles.expire()
            counts = {name: int(n) for name, n in self._counts.items()}
            disk = self._disk
            return {
                "identity": self.identity.root.hex(),
                "block_tokens": BLOCK_TOKENS,
                "hits": counts.pop("hits", 0),
                "misses": counts.pop("misses", 0),
                "ram": {
                    "blocks": len(self._ram),
                    "bytes": self._ram.nbytes,
                    "budget_bytes": self._ram.budget,
                    "evictions": counts.pop("ram_evictions", 0),
                    "refused": counts.pop("refused", 0),
                    "loaded_tokens": counts.pop("loaded_tokens_ram", 0),
                },
                "disk": None
                if disk is None
                else {
                    "blocks": len(disk.index),
                    "bytes": disk.index.nbytes,
                    "budget_bytes": disk.index.budget,
                    "pending": disk.pending,
                    "loaded_tokens": counts.pop("loaded_tokens_disk", 0),
                    **asdict(disk.counters),
                },
                "pinned_blocks": sum(k in self._ram or (disk is not None and disk.holds(k)) for k in self._pins),
                "entries": [
                    {
                        "cache_id": h.cache_id,
                        "tokens": h.n_tokens,
                        "cached_tokens": pieces[-1].stop if (pieces := self._match(h.tokens)) else 0,
                        "live": h.live,
                    }
                    for h in self._handles
                ],
            }

    def close(self) -> None:
        """Writes what waits for the disk and ends its threads; may be called twice."""
        if self._disk is not None:
            self._disk.close()


class Load:
    """Blocks on their way from the cache to a slot, pinned until `close`."""

    def __init__(
        self, cache: PrefixCache, pieces: Sequence[Piece], pinned: Sequence[Key], have: int, wake: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._coming: deque[tuple[Piece, NDArray | Future[NDArray | None] | None]] = deque()
        self._rest = deque(pieces)
        self._pinned = pinned
        self._have = have
        self._wake = wake
        self.finished = False
        self._read_ahead()

    def next(self) -> tuple[int, NDArray] | None:
        """(start, K and V from there on (2, L, n, KH, HD)), in order; None: not here yet, or `finished`."""
        if not self._coming:
            self.finished = True
            return None
        piece, source = self._coming[0]
        if isinstance(source, Future):
            if not source.done():
                return None
            data = source.result()
            if data is not None:
                self._cache.promote(piece.key, data)
        else:
            data = source
        if data is None:  # damaged, or gone: what came before it is still good
            self.finished = True
            return None
        self._coming.popleft()
        self._read_ahead()
        start = max(piece.start, self._have)
        self._cache.count_loaded(piece.stop - start, "disk" if isinstance(source, Future) else "ram")
        self.finished = not self._coming
        return start, data[:, :, start - piece.start : piece.stop - piece.start]

    def close(self) -> None:
        """Lets the blocks go; may be called twice."""
        self.finished = True
        self._cache.unpin(self._pinned)
        self._pinned = ()

    def _read_ahead(self) -> None:
        while self._rest and len(self._coming) < _READ_AHEAD:
            piece = self._rest.popleft()
            source = self._cache.fetch(piece.key)
            self._coming.append((piece, source))
            if isinstance(source, Future) and not source.done():
                source.add_done_callback(lambda _: self._wake())
