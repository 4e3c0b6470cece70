"""Where the kernel sources are, and a digest of the headers that they include."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from m40llm.device.errors import DeviceError

_PACKAGE = Path(__file__).resolve().parent.parent


def _find_kernel_dir() -> Path:
    """A wheel carries the sources inside the package; a checkout has them beside it."""
    inside_wheel = _PACKAGE / "_kernels"
    return inside_wheel if inside_wheel.is_dir() else _PACKAGE.parent / "kernels"


KERNEL_DIR = _find_kernel_dir()
HOST_DIR = KERNEL_DIR / "host"  # the emulator's runtime; no device code


def kernel_source(module: str, kernel_dir: Path = KERNEL_DIR) -> Path:
    """Path of `<kernel_dir>/<module>.cu`. Raises DeviceError if there is none."""
    path = kernel_dir / f"{module}.cu"
    if not path.is_file():
        raise DeviceError(f"there is no kernel source {path}")
    return path


def kernel_modules(kernel_dir: Path = KERNEL_DIR) -> list[str]:
    """Names of all modules, sorted."""
    return sorted(path.stem for path in kernel_dir.glob("*.cu"))


def include_dirs(kernel_dir: Path) -> list[Path]:
    """Folders that `#include "x.cuh"` searches: the source's own, then the project's."""
    return [kernel_dir] if kernel_dir == KERNEL_DIR else [kernel_dir, KERNEL_DIR]


def headers(directories: Iterable[Path]) -> list[Path]:
    """The device headers (`*.cuh`) that the folders offer, sorted by name; of two with one name the first folder's."""
    found: dict[str, Path] = {}
    for directory in directories:
        for path in directory.glob("*.cuh"):
            found.setdefault(path.name, path)
    return [found[name] for name in sorted(found)]


def digest(*parts: bytes | str | Path) -> str:
    """SHA-256 over the parts, each with its length; the contents of paths. 32 hex digits: a cache key."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:32]
