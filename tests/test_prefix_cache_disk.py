"""The disk tier: it survives a restart, its budget holds on the disk, and no file that is not exactly right is ever used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m40llm.kv.prefix_cache import BLOCK_TOKENS, CacheIdentity, PrefixCache
from m40llm.kv.prefix_cache.block_file import file_size
from tests.prefix_cache_model import IDENTITY, OTHER_MODEL, blocks, load_all, put_chain

FILE = file_size(IDENTITY, BLOCK_TOKENS)
PLENTY = 1 << 24


def open_cache(
    folder: Path, *, ram: int = PLENTY, disk: int = PLENTY, identity: CacheIdentity = IDENTITY
) -> PrefixCache:
    return PrefixCache(identity, ram_bytes=ram, disk_dir=folder, disk_bytes=disk)


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def used(folder: Path) -> int:
    return sum(p.stat().st_size for p in files(folder))


def fill(folder: Path, *chains: list[int], identity: CacheIdentity = IDENTITY, disk: int = PLENTY) -> None:
    cache = open_cache(folder, identity=identity, disk=disk)
    for chain in chains:
        put_chain(cache, chain)
    cache.close()


def test_a_restart_finds_what_was_kept(tmp_path: Path) -> None:
    prompt = list(range(200))
    fill(tmp_path, prompt)
    cache = open_cache(tmp_path)
    assert load_all(cache, [*prompt, 1]).shape[2] == 200
    assert cache.stats()["disk"]["loaded_tokens"] == 200
    assert load_all(cache, [*prompt, 1]).shape[2] == 200  # now from RAM
    assert cache.stats()["ram"]["loaded_tokens"] == 200
    cache.close()
    cache.close()


def test_the_disk_holds_what_ram_has_no_room_for(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, ram=0)
    put_chain(cache, blocks(1, 2, 3, tail=5))
    assert load_all(cache, blocks(1, 2, 3)).shape[2] in (128, 133)  # whole blocks also while they wait to be written
    cache.flush()
    assert cache.stats()["disk"]["pending"] == 0
    assert load_all(cache, blocks(1, 2, 3)).shape[2] == 133
    cache.close()


def test_the_last_block_of_a_chain_grows_on_disk_too(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1, tail=10), blocks(1, tail=40), blocks(1, 2))
    assert len(files(tmp_path)) == 2


def test_the_budget_holds_on_the_disk_and_leaves_go_first(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, disk=3 * FILE + 5)
    for symbol in range(2, 8):
        put_chain(cache, blocks(1, symbol))
        cache.flush()
        assert used(tmp_path) <= 3 * FILE + 5
    cache.close()
    cache = open_cache(tmp_path, ram=0)
    found = [cache.matched_tokens(blocks(1, s)) for s in range(2, 8)]
    assert found == [64, 64, 64, 64, 128, 128]
    cache.close()


def test_a_smaller_budget_at_the_next_start_trims_by_age(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1, 2), blocks(3))
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (1e9 - age, 1e9 - age))
    cache = open_cache(tmp_path)
    load_all(cache, [*blocks(1, 2), 9])  # the youngest now
    cache.close()
    open_cache(tmp_path, disk=2 * FILE).close()
    cache = open_cache(tmp_path)
    assert (cache.matched_tokens(blocks(1, 2)), cache.matched_tokens(blocks(3))) == (128, 0)
    cache.close()


def test_flush_writes_what_only_ram_has(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    put_chain(cache, blocks(1, 2))
    cache.flush()
    for path in files(tmp_path):
        path.unlink()
    load_all(cache, blocks(1, 2))
    cache._disk.index.drop(next(iter(reversed(list(cache._disk.index)))).key)  # type: ignore[union-attr]
    before = cache.written_blocks
    cache.flush()
    assert cache.written_blocks - before == 2
    assert len(files(tmp_path)) == 2
    cache.close()


def test_another_model_uses_none_of_it_and_has_its_share(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1, 2, 3, 4))
    cache = open_cache(tmp_path, identity=OTHER_MODEL, disk=4 * FILE)
    assert cache.matched_tokens(blocks(1, 2)) == 0
    assert used(tmp_path) <= 2 * FILE  # older models keep half at most
    cache.close()


def test_a_folder_of_another_model_under_this_name_is_set_aside(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1), identity=OTHER_MODEL)
    (tmp_path / OTHER_MODEL.root.hex()).rename(tmp_path / IDENTITY.root.hex())
    cache = open_cache(tmp_path)
    assert cache.matched_tokens(blocks(1)) == 0
    assert [p.suffix for p in files(tmp_path)] == [".bad"]
    cache.close()


@pytest.mark.parametrize("content", [b"", b"M40LLMKV", b"\0" * FILE, os.urandom(300)])
def test_foreign_files_are_set_aside(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / IDENTITY.root.hex()
    folder.mkdir()
    (folder / ("ab" * 16 + ".kv")).write_bytes(content)
    (folder / "readme.txt").write_text("not ours, left alone")
    (folder / ("cd" * 16 + ".kv")).mkdir()
    cache = open_cache(tmp_path)
    assert cache.stats()["disk"]["set_aside"] == 2
    assert put_chain(cache, blocks(1))
    cache.close()
    assert {p.name for p in files(tmp_path) if p.suffix != ".kv"} == {"readme.txt", "ab" * 16 + ".kv.bad"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_noticed_before_use(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    prompt = blocks(1, 2, 3, tail=20)
    fill(folder, prompt)
    victim = data.draw(st.sampled_from(files(folder)))
    content = bytearray(victim.read_bytes())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    elif data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content += b"x" * data.draw(st.integers(1, 5000))
    before_open = data.draw(st.booleans())
    if before_open:
        victim.write_bytes(content)
    cache = open_cache(folder, ram=data.draw(st.sampled_from((0, PLENTY))))
    if not before_open:
        victim.write_bytes(content)
    got = load_all(cache, [*prompt, 9]).shape[2]  # checks what it gets against the tokens
    assert got in (0, 64, 128)  # everything before the damaged block, nothing after
    assert cache.stats()["disk"]["set_aside"] == 1
    assert victim.with_name(victim.name + ".bad").exists()
    assert not victim.exists()
    assert put_chain(cache, prompt)  # it heals
    cache.close()
    cache = open_cache(folder, ram=0)
    assert load_all(cache, [*prompt, 9]).shape[2] == len(prompt)
    cache.close()


def test_vanished_files_are_a_miss(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1, 2))
    cache = open_cache(tmp_path)
    shutil.rmtree(tmp_path)
    assert load_all(cache, [*blocks(1, 2), 9]).shape[2] == 0
    assert cache.matched_tokens(blocks(1)) == 0
    cache.close()


def test_a_disk_that_cannot_be_written_costs_the_tier_only(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    shutil.rmtree(tmp_path)
    assert put_chain(cache, blocks(1, 2))
    cache.flush()
    assert cache.stats()["disk"]["skipped"] >= 1
    assert load_all(cache, [*blocks(1, 2), 9]).shape[2] == 128
    cache.close()


def test_leftovers_of_a_crash_go_away(tmp_path: Path) -> None:
    fill(tmp_path, blocks(1, 2), blocks(3))
    folder = tmp_path / IDENTITY.root.hex()
    old, new = folder / ".a.kv.1.tmp", folder / ".b.kv.2.tmp"
    old.touch()
    os.utime(old, (1e9, 1e9))
    new.touch()  # another process may be writing it
    cache = open_cache(tmp_path, ram=0)
    first = next(iter(cache.match(blocks(1)))).key.hex() + ".kv"
    cache.close()
    (folder / first).unlink()  # no chain leads to the second block any more
    open_cache(tmp_path).close()
    assert len([p for p in files(folder) if p.suffix == ".kv"]) == 1
    assert [p for p in files(folder) if p.suffix == ".tmp"] == [new]


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    one, two = open_cache(tmp_path), open_cache(tmp_path)
    put_chain(one, blocks(1, 2))
    put_chain(two, blocks(1, 2))
    one.close()
    two.close()
    assert len(files(tmp_path)) == 2


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(OSError, match="x"):
        open_cache(tmp_path / "x")
