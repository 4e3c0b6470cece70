"""ChainIndex: which blocks a tier holds, how they chain, and which go first when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from m40llm.kv.prefix_cache.keys import Key, shared_tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Node(Generic[T]):
    """One block of one tier. `nbytes` is what it costs there."""

    key: Key
    parent: Key
    tokens: bytes
    nbytes: int
    payload: T


class ChainIndex(Generic[T]):
    """Blocks by key, at most `budget` bytes of them, the least recently used leaves leaving first.

    Using a block moves it and then its ancestors to the young end, so a parent is always younger than its children and
    the oldest block is always a leaf. For the same reason no block is here without its ancestors.

    Args:
        root: parent of every first block.
        budget: bytes.
        pinned: keys that must stay; with a key also its ancestors'.
    """

    def __init__(self, root: Key, budget: int, pinned: Container[Key]) -> None:
        self.root = root
        self.budget = budget
        self.nbytes = 0
        self._pinned = pinned
        self._nodes: OrderedDict[Key, Node[T]] = OrderedDict()  # oldest first
        self._children: dict[Key, dict[Key, Node[T]]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Node[T]]:
        """Blocks, children before parents."""
        return iter(self._nodes.values())

    def find(self, key: Key, parent: Key, tokens: bytes) -> Node[T] | None:
        """The block, if it holds exactly these tokens after this parent: a digest may collide, a prefix may not."""
        node = self._nodes.get(key)
        return node if node is not None and node.tokens == tokens and node.parent == parent else None

    def get(self, key: Key) -> Node[T] | None:
        return self._nodes.get(key)

    def longest_child(self, parent: Key, tokens: bytes) -> tuple[Node[T] | None, int]:
        """The child of `parent` that starts with most of `tokens`, and with how many of them."""
        best, most = None, 0
        for node in self._children.get(parent, {}).values():
            if node.tokens[:4] == tokens[:4]:
                n = shared_tokens(node.tokens, tokens)
                if n > most:
                    best, most = node, n
        return best, most

    def touch(self, key: Key) -> None:
        """Marks a block and its ancestors as just used."""
        node = self._nodes.get(key)
        while node is not None:
            self._nodes.move_to_end(node.key)
            node = self._nodes.get(node.parent)

    def make_room(self, nbytes: int, parent: Key) -> list[Node[T]] | None:
        """Removes the oldest leaves until `nbytes` more fit beside the chain of `parent`, and returns what was removed.

        None, with nothing removed: they cannot fit, because of what is pinned or the chain's own size.
        """
        missing = self.nbytes + nbytes - self.budget
        if missing > 0 and nbytes > self.budget:
            return None
        own = self._chain(parent)
        victims: list[Node[T]] = []
        for node in self._nodes.values():
            if missing <= 0:
                break
            if node.key not in own and node.key not in self._pinned:
                victims.append(node)
                missing -= node.nbytes
        if missing > 0:
            return None
        for node in victims:
            self._remove(node)
        return victims

    def insert(self, node: Node[T]) -> bool:
        """Adds a block for which there is room. False: its parent is not here.

        Raises:
            ValueError: the budget would be exceeded.
        """
        if node.key in self._nodes:
            self.touch(node.key)
            return True
        if node.parent != self.root and node.parent not in self._nodes:
            return False
        if self.nbytes + node.nbytes > self.budget:
            raise ValueError(f"{node.nbytes} bytes more than the budget of {self.budget} allows")
        self._nodes[node.key] = node
        self._children.setdefault(node.parent, {})[node.key] = node
        self.nbytes += node.nbytes
        self.touch(node.key)
        return True

    def covered(self, parent: Key, tokens: bytes) -> Node[T] | None:
        """A longer sibling that starts with `tokens`: a short last block that need not be stored."""
        for node in self._children.get(parent, {}).values():
            if len(node.tokens) > len(tokens) and node.tokens.startswith(tokens):
                return node
        return None

    def drop_covered_by(self, parent: Key, tokens: bytes) -> list[Node[T]]:
        """Removes shorter siblings that `tokens` starts with, unless pinned: the last block of a chain has grown."""
        removed = [
            node
            for node in self._children.get(parent, {}).values()
            if len(node.tokens) < len(tokens) and tokens.startswith(node.tokens) and node.key not in self._pinned
        ]
        for node in removed:
            self._remove(node)
        return removed

    def drop(self, key: Key) -> list[Node[T]]:
        """Removes a block and everything that builds on it, pinned or not; leaves first."""
        node = self._nodes.get(key)
        if node is None:
            return []
        removed: list[Node[T]] = []
        stack = [node]
        while stack:
            node = stack.pop()
            removed.append(node)
            stack.extend(self._children.get(node.key, {}).values())
        removed.reverse()
        for node in removed:
            self._remove(node)
        return removed

    def drop_branch(self, key: Key) -> list[Node[T]]:
        """Removes a leaf and then each ancestor that has become one, up to what is pinned or still has children."""
        removed = []
        node = self._nodes.get(key)
        while node is not None and node.key not in self._children and node.key not in self._pinned:
            self._remove(node)
            removed.append(node)
            node = self._nodes.get(node.parent)
        return removed

    def _chain(self, key: Key) -> set[Key]:
        keys = set()
        node = self._nodes.get(key)
        while node is not None:
            keys.add(node.key)
            node = self._nodes.get(node.parent)
        return keys

    def _remove(self, node: Node[T]) -> None:
        del self._nodes[node.key]
        siblings = self._children[node.parent]
        del siblings[node.key]
        if not siblings:
            del self._children[node.parent]
        self.nbytes -= node.nbytes
