"""The prefix cache in RAM: what is found is what was kept, the budget holds, leaves go first, pinned chains stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.kv.prefix_cache import BLOCK_TOKENS, CacheError, PrefixCache, UnknownCacheId
from m40llm.kv.prefix_cache.cache import NODE_BYTES
from m40llm.kv.prefix_cache.index import ChainIndex, Node
from m40llm.kv.prefix_cache.keys import block_key, encode_tokens
from m40llm.kv.transfer import CacheTraffic
from tests.prefix_cache_model import IDENTITY, blocks, kv_of, load_all, put_chain

BLOCK_BYTES = IDENTITY.block_bytes(BLOCK_TOKENS) + NODE_BYTES
PLENTY = 1 << 24


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_prompt_is_found_again_up_to_its_last_token() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    prompt = list(range(200))
    assert put_chain(cache, prompt)
    assert load_all(cache, prompt).shape[2] == 199
    assert load_all(cache, [*prompt, 7]).shape[2] == 200
    assert load_all(cache, prompt, have=70).shape[2] == 129


def test_a_block_serves_prompts_that_share_only_its_first_tokens() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    put_chain(cache, list(range(200)))
    assert cache.matched_tokens([*range(100), 5000, *range(101, 200)]) == 100
    assert cache.matched_tokens([5000, *range(200)]) == 0


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    put_chain(cache, blocks(1, 2))
    put_chain(cache, blocks(3))
    assert cache.matched_tokens(blocks(3, 2)) == 64


def test_a_colliding_key_is_not_a_hit() -> None:
    index: ChainIndex[None] = ChainIndex(IDENTITY.root, PLENTY, set())
    index.insert(Node(b"k", IDENTITY.root, b"abcd", 1, None))
    assert index.find(b"k", IDENTITY.root, b"abcd") is not None
    assert index.find(b"k", IDENTITY.root, b"abce") is None
    assert index.find(b"k", b"other parent", b"abcd") is None


def test_the_last_block_of_a_chain_grows_in_place() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    put_chain(cache, blocks(1, 2, tail=10))
    put_chain(cache, blocks(1, 2, tail=30))
    put_chain(cache, blocks(1, 2, 3))
    put_chain(cache, blocks(1, 2, tail=20))  # covered by what is there
    assert cache.stats()["ram"]["blocks"] == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=3 * BLOCK_BYTES)
    put_chain(cache, blocks(1, 2))
    put_chain(cache, blocks(1, 3))
    load_all(cache, [*blocks(1, 2), 9])
    put_chain(cache, blocks(4))
    found = [cache.matched_tokens(blocks(*chain)) for chain in ((1, 2), (1, 3), (4,))]
    assert found == [128, 64, 64]


def test_a_block_larger_than_the_budget_is_refused() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=BLOCK_BYTES - 1)
    assert not put_chain(cache, blocks(1))
    assert cache.stats()["ram"]["bytes"] == 0


def test_a_chain_longer_than_the_budget_keeps_its_beginning() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=2 * BLOCK_BYTES)
    assert not put_chain(cache, blocks(1, 2, 3))
    assert cache.matched_tokens(blocks(1, 2, 3)) == 128


def test_what_is_being_loaded_is_not_evicted() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=2 * BLOCK_BYTES)
    put_chain(cache, blocks(1, 2))
    load = cache.open_load([*blocks(1, 2), 9], 0, 0, lambda: None)
    assert load is not None
    assert not put_chain(cache, blocks(3))
    load.close()
    load.close()
    assert put_chain(cache, blocks(3))


def test_a_live_entry_keeps_its_chain_and_an_old_one_does_not() -> None:
    clock = Clock()
    cache = PrefixCache(IDENTITY, ram_bytes=2 * BLOCK_BYTES, live_seconds=100, clock=clock)
    cache.bind("agent", blocks(1, 2))  # before its blocks are there, as when a request starts
    put_chain(cache, blocks(1, 2))
    assert not put_chain(cache, blocks(3))
    clock.now = 90
    assert cache.select(["unknown", "agent"], blocks(1, 2, 5)) == "agent"
    clock.now = 180
    assert not put_chain(cache, blocks(3))
    clock.now = 200
    assert put_chain(cache, blocks(3))
    entry = cache.stats()["entries"][0]
    assert entry == {"cache_id": "agent", "tokens": 128, "cached_tokens": 64, "live": False}


def test_the_most_specific_entry_that_the_prompt_continues_is_selected() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    cache.bind("system", blocks(1))
    cache.bind("thread", blocks(1, 2))
    assert cache.select(["thread", "system"], blocks(1, 2, 3)) == "thread"
    assert cache.select(["thread", "system"], blocks(1, 4)) == "system"
    assert cache.select(["thread", "system"], blocks(5)) is None


def test_a_live_entry_is_not_shrunk() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    put_chain(cache, blocks(1, 2))
    cache.bind("a", blocks(1, 2))
    cache.check_warm("a", blocks(1, 2, 3))
    for tokens in (blocks(1), blocks(1, 4, 4)):
        with pytest.raises(CacheError, match="live with 128 tokens"):
            cache.check_warm("a", tokens)
    cache.bind("a", blocks(1))  # a request that was cut short does not shrink it either
    assert cache.stats()["entries"][0]["tokens"] == 128


def test_warming_more_than_fits_beside_live_entries_is_refused() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=3 * BLOCK_BYTES)
    put_chain(cache, blocks(1, 2))
    cache.bind("a", blocks(1, 2))
    cache.check_warm("b", blocks(1, 5))
    with pytest.raises(CacheError, match="raise --cache-ram-mb"):
        cache.check_warm("b", blocks(5, 6))


def test_evicting_an_entry_spares_what_others_share() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    for name, chain in (("a", (1, 2, 3)), ("b", (1, 4))):
        put_chain(cache, blocks(*chain))
        cache.bind(name, blocks(*chain))
    assert cache.evict("a") == 2
    assert [cache.matched_tokens(blocks(*c)) for c in ((1, 2, 3), (1, 4))] == [64, 128]
    with pytest.raises(UnknownCacheId, match="'a'"):
        cache.evict("a")


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_an_entry_needs_a_proper_name(name: str) -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    with pytest.raises(CacheError, match="printable"):
        cache.bind(name, blocks(1))


def test_a_block_of_another_format_is_a_bug() -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    with pytest.raises(ValueError, match="this cache holds"):
        cache.put(IDENTITY.root, encode_tokens(blocks(1)), np.zeros((2, 2, 63, 1, 3), np.uint16))


# -- random use against plain models ---------------------------------------------------------------
PROMPTS = st.builds(
    lambda symbols, tail: blocks(*symbols, tail=tail),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.sampled_from((0, 1, 17, 63)),
)


@settings(max_examples=150, deadline=None)
@given(prompts=st.lists(PROMPTS, min_size=1, max_size=12), asked=PROMPTS)
def test_without_limits_the_longest_common_prefix_is_found(prompts: list[list[int]], asked: list[int]) -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=PLENTY)
    for prompt in prompts:
        assert put_chain(cache, prompt)
    wanted = asked[:-1]
    common = [next((i for i, (a, b) in enumerate(zip(p, wanted, strict=False)) if a != b), None) for p in prompts]
    longest = max(min(len(p), len(wanted)) if n is None else n for p, n in zip(prompts, common, strict=True))
    assert load_all(cache, asked).shape[2] == longest


class LeavesFirst:
    """The tier as plain lists: chains as tuples of symbols with the time of their last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}
        self.pinned: list[tuple[int, ...]] = []
        self.time = 0

    def touch(self, chain: tuple[int, ...]) -> None:
        self.time += 1
        for n in range(1, len(chain) + 1):
            if chain[:n] in self.used:
                self.used[chain[:n]] = self.time

    def put(self, chain: tuple[int, ...]) -> bool:
        for n in range(1, len(chain) + 1):
            link = chain[:n]
            if link not in self.used:
                spared = {p[:m] for p in [*self.pinned, link] for m in range(1, len(p) + 1)}
                if len(self.used) == self.capacity:
                    leaves = [c for c in self.used if c not in spared and not any(o[:-1] == c for o in self.used)]
                    if not leaves:
                        return False
                    del self.used[min(leaves, key=lambda c: self.used[c])]
                self.used[link] = 0
            self.touch(link)
        return True


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 6),
    steps=st.lists(
        st.tuples(
            st.sampled_from(("put", "put", "put", "load", "pin", "unpin")),
            st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        ),
        max_size=40,
    ),
)
def test_random_use_is_what_a_plain_model_does(capacity: int, steps: list[tuple[str, tuple[int, ...]]]) -> None:
    cache = PrefixCache(IDENTITY, ram_bytes=capacity * BLOCK_BYTES)
    model = LeavesFirst(capacity)
    names: list[str] = []
    for number, (action, chain) in enumerate(steps):
        tokens = blocks(*chain)
        if action == "put":
            assert put_chain(cache, tokens) == model.put(chain)
        elif action == "load":
            n = load_all(cache, [*tokens, 99]).shape[2] // BLOCK_TOKENS
            assert n == max(n for n in range(len(chain) + 1) if n == 0 or chain[:n] in model.used)
            model.touch(chain[:n])
        elif action == "pin":
            cache.bind(f"{number}", tokens)
            names.append(f"{number}")
            model.pinned.append(chain)
        elif names:
            cache._handles.remove(names.pop(0))  # unpins without evicting
            model.pinned.pop(0)
        ram = cache.stats()["ram"]
        assert ram["bytes"] == len(model.used) * BLOCK_BYTES <= ram["budget_bytes"]
        for kept in model.used:
            assert cache.matched_tokens(blocks(*kept)) == len(kept) * BLOCK_TOKENS


class Slots:
    """Slots of a device, as arrays."""

    def __init__(self, n: int, context: int) -> None:
        self.kv = np.zeros((n, 2, 2, context, 1, 3), np.uint16)

    def read_kv(self, slot: int, start: int, stop: int) -> np.ndarray:
        return self.kv[slot, :, :, start:stop].copy()

    def write_kv(self, slot: int, start: int, data: np.ndarray) -> None:
        self.kv[slot, :, :, start : start + data.shape[2]] = data


def test_a_run_is_saved_block_by_block_and_its_end_with_the_rest() -> None:
    cache, slots = PrefixCache(IDENTITY, ram_bytes=PLENTY), Slots(2, 512)
    traffic = CacheTraffic(cache, slots, lambda: None, blocks_per_step=2)
    tokens = list(range(400))
    slots.write_kv(0, 0, kv_of(tokens))
    traffic.save(0, tokens, 64 * 5 + 3)
    assert traffic.advance()  # two of five blocks: there is more to do
    assert cache.matched_tokens(tokens) == 128
    assert traffic.advance()
    assert not traffic.advance()
    assert cache.matched_tokens(tokens) == 320
    traffic.end(0, tokens, 400)
    traffic.settle(0)  # the slot is wanted
    assert cache.matched_tokens(tokens) == 400
    slots.kv[0] = 0
    arrived: list[tuple[int, bool]] = []
    assert traffic.load(1, [*tokens, 5], have=0, beyond=10, arrived=lambda n, last: arrived.append((n, last)))
    while not arrived or not arrived[-1][1]:
        traffic.advance()
    assert arrived == [*((64 * n, False) for n in range(1, 7)), (400, False), (0, True)]
    np.testing.assert_array_equal(slots.read_kv(1, 0, 400), kv_of(tokens))


def test_a_slot_that_cannot_be_trusted_is_not_saved() -> None:
    cache, slots = PrefixCache(IDENTITY, ram_bytes=PLENTY), Slots(1, 512)
    traffic = CacheTraffic(cache, slots, lambda: None)
    traffic.save(0, list(range(300)), 300)
    traffic.drop(0)
    traffic.advance()
    assert cache.stats()["ram"]["blocks"] == 0


def test_keys_chain() -> None:
    first = encode_tokens([1, 2, 3])
    assert block_key(IDENTITY.root, first) != block_key(b"s" * 16, first)
    assert first == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
