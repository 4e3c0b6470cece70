"""Where compiled kernels are kept between runs.

Numba decides staleness by a function's own file only, so an edited helper would leave old machine code in use. Here a
folder's name carries a digest of the kernel's source file, of every source of this package that it imports, directly or
not, and of the compiler's version: edited sources miss the cache, and editing one family of kernels keeps the others.

Whoever makes a new folder removes those that nobody has used for a month. A folder's time of modification says when it was last
used: every process sets it when it first needs the folder.
"""

import ast
import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import llvmlite
import numba
import platformdirs

__all__ = ["use_cache_for"]

ROOT = Path(__file__).parents[3]  # the folder that holds the package
PACKAGE = Path(__file__).parents[2].name
UNUSED_DAYS = 30
_REMOVED = ".removed"
_NAME = re.compile(r"[0-9a-f]{16}(" + re.escape(_REMOVED) + ")?")


@functools.cache
def _imports(source: Path) -> frozenset[Path]:
    """The package's own files that a source imports by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            names.add(node.module)
    files = {ROOT / (name.replace(".", "/") + ".py") for name in names if name.split(".")[0] == PACKAGE}
    return frozenset(file for file in files if file.is_file())


def _digest(source: Path) -> str:
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    seen, waiting = {source}, [source]
    while waiting:
        new = _imports(waiting.pop()) - seen
        seen |= new
        waiting += new
    for file in sorted(seen):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _base_folder() -> Path:
    """``<user cache>/m40llm/numba``, or Numba's own configured folder where one is set.

    One that cannot be written costs a warning and a temporary folder, so that only the next start is slower.
    """
    base = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else platformdirs.user_cache_path("m40llm") / "numba"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            pass
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="m40llm-numba-"))
        warnings.warn(f"kernel cache {base} is not writable ({error}); compiling into {temporary}", stacklevel=2)
        return temporary
    return base


@functools.cache
def _folder(source: Path) -> Path:
    folder = _base_folder() / _digest(source)
    try:
        folder.mkdir()
    except FileExistsError:
        with contextlib.suppress(OSError):  # another user's, or removed this very moment: Numba makes it again
            os.utime(folder)
    else:
        _remove_unused(folder.parent)
    return folder


def _remove_unused(base: Path) -> None:
    """Removes the folders of kernels in ``base`` that no process has started with for UNUSED_DAYS; errors are no matter."""
    oldest = time.time() - UNUSED_DAYS * 86400
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(base)):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                        _remove(Path(entry.path))


def _remove(folder: Path) -> None:
    """Takes the folder's name away first: nobody finds half a cache, and of two processes one removes it."""
    if folder.suffix != _REMOVED:
        folder = folder.rename(folder.with_suffix(_REMOVED))
    shutil.rmtree(folder)  # if this stops half way, the next one finds the rest by its name and its age


def use_cache_for(source: str) -> None:
    """Point Numba at the cache folder of the kernels in a source file; call it before caching is enabled for one."""
    numba.config.CACHE_DIR = str(_folder(Path(source)))
