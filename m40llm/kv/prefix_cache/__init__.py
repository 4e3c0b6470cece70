"""Prefix cache: keys and values of past prompts, in blocks, in host RAM and on disk."""

from m40llm.kv.prefix_cache.cache import Load, PrefixCache
from m40llm.kv.prefix_cache.handles import CacheError, UnknownCacheId
from m40llm.kv.prefix_cache.identity import CacheIdentity
from m40llm.kv.prefix_cache.keys import BLOCK_TOKENS

__all__ = ["BLOCK_TOKENS", "CacheError", "CacheIdentity", "Load", "PrefixCache", "UnknownCacheId"]
