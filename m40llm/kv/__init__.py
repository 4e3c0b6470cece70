"""Key/value storage."""

from m40llm.kv.layout import KVLayout

__all__ = ["KVLayout"]
