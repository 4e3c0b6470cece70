"""bench/ in tests: scripts beside each other, no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parent.parent / "bench"


def of_bench(name: str) -> ModuleType:
    """A script of bench/ as a module; it may import its neighbours."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))
