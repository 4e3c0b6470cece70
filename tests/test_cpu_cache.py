"""The folders of compiled CPU kernels: one for each state of the sources, and none for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from m40llm.ops.cpu import cache, elementwise, rope

DAY = 86400


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    (tmp_path / "numba").mkdir()
    forget()
    yield tmp_path / "numba"
    forget()


def forget() -> None:
    """As in a new process."""
    cache._base_folder.cache_clear()
    cache._folder.cache_clear()


def folder(path: Path, days: float) -> Path:
    """With something inside, last used so many days ago."""
    inside = path / "kernels_1234"
    inside.mkdir(parents=True)
    (inside / "kernel.nbi").write_bytes(b"machine code")
    used = time.time() - days * DAY
    os.utime(path, (used, used))
    return path


def names(base: Path) -> set[str]:
    return {path.name for path in base.iterdir()}


def test_a_new_folder_removes_those_that_nobody_has_used_for_a_month(base: Path, tmp_path: Path) -> None:
    folder(base / "0123456789abcdef", 31)
    folder(base / "00000000deadbeef.removed", 31)  # somebody was interrupted
    kept = {folder(base / "fedcba9876543210", 29).name}
    # not ours: other programs may keep their caches here
    kept |= {
        folder(base / name, 400).name for name in ("project_0123456789abcdef", "0123456789ABCDEF", "0123456789abcdef0")
    }
    elsewhere = folder(tmp_path / "elsewhere", 400)
    (base / "aaaaaaaaaaaaaaaa").symlink_to(elsewhere)
    os.utime(base / "aaaaaaaaaaaaaaaa", (0, 0), follow_symlinks=False)
    (base / "bbbbbbbbbbbbbbbb").write_bytes(b"a file")
    os.utime(base / "bbbbbbbbbbbbbbbb", (0, 0))
    kept |= {"aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"}

    cache.use_cache_for(elementwise.__file__)
    new = Path(numba.config.CACHE_DIR)
    assert new.parent == base
    assert names(base) == kept | {new.name}
    assert (elsewhere / "kernels_1234/kernel.nbi").is_file()


def test_a_folder_in_use_stays_young(base: Path) -> None:
    cache.use_cache_for(elementwise.__file__)
    used = Path(numba.config.CACHE_DIR)
    month = time.time() - 31 * DAY
    os.utime(used, (month, month))
    numba.config.CACHE_DIR = str(base)
    forget()
    cache.use_cache_for(elementwise.__file__)  # the next process
    assert time.time() - used.stat().st_mtime < DAY
    cache.use_cache_for(rope.__file__)  # a new folder: the other one is looked at, and left
    assert names(base) == {used.name, Path(numba.config.CACHE_DIR).name}
    assert len(names(base)) == 2


def test_what_cannot_be_removed_is_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = folder(base / "0123456789abcdef", 31)
    folder(base / "0123456789abcdef.removed", 1)  # a folder that is not empty cannot be renamed to
    gone = folder(base / "fedcba9876543210", 31)
    cache.use_cache_for(elementwise.__file__)
    assert stuck.is_dir()
    assert not gone.exists()
    assert len(names(base)) == 3
