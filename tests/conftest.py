"""Fixtures shared by the suite: the real models of the registry, fetched on first use as a user's would be."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from m40llm.cli.model_arg import resolve_model
from tests.chat_browser import driver, page  # noqa: F401  # fixtures
from tests.server_process import server  # noqa: F401  # a fixture

DATA = Path(__file__).parent / "data"

# A shell's background job ignores Ctrl-C, and so would every program that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: 98 MB, in every run."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct Q4_K_M: 1.1 GB, for tests marked `models`."""
    return resolve_model("qwen2.5-coder-1.5b")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma-3 270M Q4_K_M: 253 MB, for tests marked `models`."""
    return resolve_model("gemma3-270m")
