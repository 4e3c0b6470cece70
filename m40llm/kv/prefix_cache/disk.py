"""The disk tier: one file per block in a folder per identity, read and written by two background threads."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from numpy.typing import NDArray

from m40llm.kv.prefix_cache.block_file import (
    SUFFIX,
    BlockHeader,
    DamagedBlock,
    file_size,
    read_block,
    read_header,
    write_block,
)
from m40llm.kv.prefix_cache.identity import CacheIdentity
from m40llm.kv.prefix_cache.index import ChainIndex, Node
from m40llm.kv.prefix_cache.keys import TOKEN_BYTES, Key

_log = logging.getLogger(__name__)

# Blocks that wait for the disk stay in memory beside the RAM tier; when so many bytes wait, new ones are not kept.
PENDING_BYTES = 128 << 20
_STALE_SECONDS = 3600  # a temporary file that old was left by a process that died


@dataclass(slots=True)
class DiskCounters:
    """Since the start."""

    writes: int = 0
    skipped: int = 0  # blocks not written: the disk was too slow, full, or its budget pinned
    reads: int = 0
    set_aside: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Pending:
    header: BlockHeader
    data: NDArray
    done: Future[None] = field(default_factory=Future)


class DiskTier:
    """Blocks as files. `lock` guards the index and is never held during reading, writing or hashing of a block.

    Args:
        folder: `cache_disk_dir`; files go to a sub-folder named after the identity.
        budget: bytes of this folder, other models' blocks included (they keep half of it at most).

    Raises:
        OSError: the folder cannot be made or listed.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        identity: CacheIdentity,
        pinned: set[Key] | dict[Key, int],
        lock: threading.RLock,
    ) -> None:
        self._identity = identity
        self._lock = lock
        self._folder = folder / identity.root.hex()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.counters = DiskCounters()
        self._pending: dict[Key, _Pending] = {}
        self._pending_bytes = 0
        others = _trim_other_models(folder, self._folder.name, budget // 2)
        self.index: ChainIndex[None] = ChainIndex(identity.root, max(0, budget - others), pinned)
        self._restore()
        self._writer = ThreadPoolExecutor(1, "m40llm-cache-write")
        self._reader = ThreadPoolExecutor(1, "m40llm-cache-read")

    @property
    def pending(self) -> int:
        """Blocks not yet written."""
        return len(self._pending)

    def holds(self, key: Key) -> bool:
        """It is on disk or about to be."""
        return key in self.index or key in self._pending

    def find(self, key: Key, parent: Key, tokens: bytes) -> bool:
        """Whether a read of the block can be tried; see `ChainIndex.find`."""
        waiting = self._pending.get(key)
        if waiting is not None:
            return waiting.header.tokens == tokens and waiting.header.parent == parent
        return self.index.find(key, parent, tokens) is not None

    def write_later(self, header: BlockHeader, data: NDArray) -> bool:
        """Queues a block; `data` must not change any more. False: it is not kept."""
        with self._lock:
            if self.holds(header.key):
                self.index.touch(header.key)
                return True
            if header.parent != self.index.root and not self.holds(header.parent):
                return False
            if self.index.covered(header.parent, header.tokens) is not None:
                return True
            if self._pending and self._pending_bytes + data.nbytes > PENDING_BYTES:
                self.counters.skipped += 1
                return False
            waiting = self._pending[header.key] = _Pending(header, data)
            self._pending_bytes += data.nbytes
        self._writer.submit(self._write, waiting)
        return True

    def read(self, key: Key) -> Future[NDArray | None]:
        """A block's K and V, or None when its file turned out to be missing or damaged (and is then forgotten)."""
        with self._lock:
            waiting = self._pending.get(key)
        if waiting is not None:
            ready: Future[NDArray | None] = Future()
            ready.set_result(waiting.data)
            return ready
        return self._reader.submit(self._read, key)

    def has_free_room(self, tokens: int) -> bool:
        """A block of so many tokens can be written without evicting another."""
        return self.index.nbytes + file_size(self._identity, tokens) <= self.index.budget

    def flush(self) -> None:
        """Waits until what is queued now is written."""
        with self._lock:
            waiting = [p.done for p in self._pending.values()]
        for done in waiting:
            done.result()

    def close(self) -> None:
        """Writes what is queued and ends the threads; may be called twice."""
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True, cancel_futures=True)

    def forget(self, nodes: list[Node[None]]) -> None:
        """Deletes the files of blocks that left the index."""
        for node in nodes:
            with suppress(OSError):  # already gone is as good
                self._path(node.key).unlink()

    def _path(self, key: Key) -> Path:
        return self._folder / (key.hex() + SUFFIX)

    # -- writer thread -----------------------------------------------------------------------------
    def _write(self, waiting: _Pending) -> None:
        try:
            if not self._store(waiting.header, waiting.data):
                self.counters.skipped += 1
        except (OSError, MemoryError) as error:
            self.counters.skipped += 1
            _log.warning("prefix cache: a block could not be written (%s)", error)
        finally:
            with self._lock:
                del self._pending[waiting.header.key]
                self._pending_bytes -= waiting.data.nbytes
            waiting.done.set_result(None)

    def _store(self, header: BlockHeader, data: NDArray) -> bool:
        nbytes = file_size(self._identity, len(header.tokens) // TOKEN_BYTES)
        with self._lock:
            if header.parent != self.index.root and header.parent not in self.index:
                return False
            victims = self.index.make_room(nbytes, header.parent)
        if victims is None:
            return False
        # Room first, file second, entry third: the budget holds on the disk too. Only this thread adds entries.
        self.counters.evictions += len(victims)
        self.forget(victims)
        path = self._path(header.key)
        write_block(path, self._identity, header, data)
        with self._lock:
            added = self.index.insert(Node(header.key, header.parent, header.tokens, nbytes, None))
            outgrown = self.index.drop_covered_by(header.parent, header.tokens) if added else []
        self.forget(outgrown)
        if not added:  # the parent was evicted meanwhile
            path.unlink(missing_ok=True)
        self.counters.writes += added
        return added

    # -- reader thread -----------------------------------------------------------------------------
    def _read(self, key: Key) -> NDArray | None:
        with self._lock:
            node = self.index.get(key)
            if node is None:
                return None
            self.index.touch(key)
        path = self._path(key)
        try:
            header, data = read_block(path, self._identity)
            if (header.parent, header.tokens) != (node.parent, node.tokens):
                raise DamagedBlock("it holds other tokens than when it was indexed")
        except DamagedBlock as problem:
            self._set_aside(path, problem)
        except (OSError, MemoryError) as error:
            _log.warning("prefix cache: %s cannot be read (%s)", path, error)
        else:
            with suppress(OSError):
                os.utime(path)  # the age that the next start sees
            self.counters.reads += 1
            return data
        with self._lock:
            lost = self.index.drop(key)
        self.forget([n for n in lost if n.key != key])
        return None

    def _set_aside(self, path: Path, problem: DamagedBlock) -> None:
        self.counters.set_aside += 1
        bad = path.with_name(path.name + ".bad")
        _log.warning("prefix cache: %s is set aside as %s: %s", path, bad.name, problem)
        try:
            path.replace(bad)
        except OSError as error:
            _log.warning("prefix cache: %s cannot be renamed (%s)", path, error)

    # -- start -------------------------------------------------------------------------------------
    def _restore(self) -> None:
        """Indexes the folder by its headers, in the order of last use; damaged and foreign files are set aside."""
        found: dict[Key, tuple[int, Node[None]]] = {}
        now = time.time()
        for entry in sorted(os.scandir(self._folder), key=lambda e: e.name):
            path = Path(entry.path)
            if entry.name.endswith(".tmp"):
                with suppress(OSError):
                    if now - entry.stat().st_mtime > _STALE_SECONDS:
                        path.unlink()
            elif entry.name.endswith(SUFFIX):
                try:
                    status = entry.stat()
                    if not entry.is_file(follow_symlinks=False):
                        raise DamagedBlock("it is not a regular file")
                    header = read_header(path, self._identity)
                except DamagedBlock as problem:
                    self._set_aside(path, problem)
                except OSError as error:
                    _log.warning("prefix cache: %s cannot be read (%s)", path, error)
                else:
                    node: Node[None] = Node(header.key, header.parent, header.tokens, status.st_size, None)
                    found[header.key] = (status.st_mtime_ns, node)
        budget, self.index.budget = self.index.budget, sum(node.nbytes for _, node in found.values())
        orphans = self._attach([node for _, node in found.values()])
        for _, node in sorted((item for item in found.values() if item[1].key in self.index), key=lambda item: item[0]):
            self.index.touch(node.key)
        self.index.budget = budget
        self.forget(orphans + (self.index.make_room(0, self.index.root) or []))

    def _attach(self, nodes: list[Node[None]]) -> list[Node[None]]:
        """Inserts parents before children; returns the blocks that no chain leads to."""
        children: dict[Key, list[Node[None]]] = {}
        for node in nodes:
            children.setdefault(node.parent, []).append(node)
        stack = list(children.pop(self.index.root, []))
        while stack:
            node = stack.pop()
            self.index.insert(node)
            stack.extend(children.pop(node.key, []))
        return [node for group in children.values() for node in group]


def _trim_other_models(folder: Path, own: str, allowed: int) -> int:
    """Deletes other identities' folders, the longest unused first, until they fit; returns the bytes that stay."""
    sizes: list[tuple[float, int, Path]] = []
    for entry in os.scandir(folder):
        if entry.name != own and re.fullmatch("[0-9a-f]{32}", entry.name) and entry.is_dir(follow_symlinks=False):
            files: list[os.stat_result] = []
            with suppress(OSError):  # another process may be evicting there
                files.extend(f.stat() for f in os.scandir(entry.path) if f.is_file(follow_symlinks=False))
            used = max((f.st_mtime for f in files), default=0.0)
            sizes.append((used, sum(f.st_size for f in files), Path(entry.path)))
    total = sum(size for _, size, _ in sizes)
    for _, size, path in sorted(sizes):
        if total <= allowed:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= size
    return total
