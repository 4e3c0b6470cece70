"""One block in one file: a header with its own checksum, so that opening a folder need not read gigabytes, then K and V.

    magic 8 | version u32 | tokens n u32 | identity 16 | parent 16 | key 16 | token ids n × i32 | BLAKE2b-128 of all that
    K and V in the KV storage type, (2, L, n, KH, HD) | CRC-32 of them, u32

CRC-32 because it is there against damage, not forgery, and takes a quarter of the time of a cryptographic digest, which would be
most of what a read costs. Integers are little-endian. The size of a file follows from n, so nothing in it is trusted with an
allocation.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m40llm.kv.prefix_cache.identity import FORMAT_VERSION, CacheIdentity
from m40llm.kv.prefix_cache.keys import BLOCK_TOKENS, TOKEN_BYTES, Key, block_key

SUFFIX = ".kv"
_MAGIC = b"M40LLMKV"
_FIXED = struct.Struct("<8sII16s16s16s")
_DIGEST = 16
_CRC = struct.Struct("<I")


class DamagedBlock(ValueError):
    """A file that is not a block of this cache, or no longer one; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file says about its block, checked."""

    key: Key
    parent: Key
    tokens: bytes


def file_size(identity: CacheIdentity, tokens: int) -> int:
    """Bytes of the file of a block of `tokens` tokens."""
    return _FIXED.size + tokens * TOKEN_BYTES + identity.block_bytes(tokens) + _DIGEST + _CRC.size


def write_block(path: Path, identity: CacheIdentity, header: BlockHeader, data: NDArray) -> None:
    """Writes a block under a temporary name and renames it, so that a reader sees all of it or nothing.

    Raises:
        OSError: the disk is full or the folder not writable; nothing is left behind.
    """
    n = len(header.tokens) // TOKEN_BYTES
    fixed = _FIXED.pack(_MAGIC, FORMAT_VERSION, n, identity.root, header.parent, header.key)
    payload = np.ascontiguousarray(data, identity.storage)
    if payload.shape != identity.block_shape(n):
        raise ValueError(f"a block of shape {payload.shape}; this cache's are {identity.block_shape(n)}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(fixed + header.tokens)
            out.write(_digest(fixed + header.tokens))
            out.write(payload.reshape(-1).view(np.uint8).data)
            out.write(_CRC.pack(zlib.crc32(payload.reshape(-1).view(np.uint8).data)))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path, identity: CacheIdentity) -> BlockHeader:
    """The checked header of a file of the right size; its K and V are not looked at.

    Raises:
        DamagedBlock: it is damaged, or not a block of this cache.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_FIXED.size + BLOCK_TOKENS * TOKEN_BYTES + _DIGEST)
        return _parse(head, os.fstat(file.fileno()).st_size, path, identity)


def read_block(path: Path, identity: CacheIdentity) -> tuple[BlockHeader, NDArray]:
    """A file's header and its K and V, both checked. Raises as `read_header` does."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > file_size(identity, BLOCK_TOKENS):
            raise DamagedBlock(f"it has {size} bytes, more than any block")
        content = np.fromfile(file, np.uint8)
    header = _parse(
        content[: _FIXED.size + BLOCK_TOKENS * TOKEN_BYTES + _DIGEST].tobytes(), content.size, path, identity
    )
    n = len(header.tokens) // TOKEN_BYTES
    start = _FIXED.size + len(header.tokens) + _DIGEST
    payload = content[start : start + identity.block_bytes(n)]
    if _CRC.pack(zlib.crc32(payload.data)) != content[start + payload.size :].tobytes():
        raise DamagedBlock("the checksum of its keys and values is wrong")
    # a copy: the payload need not lie at a multiple of the item size
    return header, np.frombuffer(payload.tobytes(), identity.storage).reshape(identity.block_shape(n))


def _parse(head: bytes, size: int, path: Path, identity: CacheIdentity) -> BlockHeader:
    if len(head) < _FIXED.size:
        raise DamagedBlock(f"it has only {size} bytes")
    magic, version, n, root, parent, key = _FIXED.unpack_from(head)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise DamagedBlock(f"it is not a cache block of version {FORMAT_VERSION}")
    if not 1 <= n <= BLOCK_TOKENS or size != file_size(identity, n):
        raise DamagedBlock(f"its size of {size} bytes does not fit its {n} tokens")
    end = _FIXED.size + n * TOKEN_BYTES
    if head[end : end + _DIGEST] != _digest(head[:end]):
        raise DamagedBlock("the checksum of its header is wrong")
    tokens = head[_FIXED.size : end]
    if root != identity.root or key != block_key(parent, tokens) or path.name != key.hex() + SUFFIX:
        raise DamagedBlock("it belongs to another model, another cache format or another name")
    return BlockHeader(key, parent, tokens)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
