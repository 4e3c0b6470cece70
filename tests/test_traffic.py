"""bench/traffic.py on small shapes: a decode token moves what it must and hardly more, and the check can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

from tests.bench_scripts import BENCH, of_bench


@pytest.fixture(scope="module")
def traffic() -> ModuleType:
    return of_bench("traffic")


def test_a_small_decode_token_keeps_to_the_limits() -> None:
    command = [sys.executable, str(BENCH / "traffic.py"), "--check", "--small", "--no-kernels", "--json"]
    done = subprocess.run([*command, "--model", "tiny-q4_1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == []
    (row,) = result["rows"]
    assert 0.99 * row["floor"] < row["dram"] <= 1.05 * row["floor"]
    assert row["l2_to_sm"] >= row["l2_floor"]
    assert row["shared_passes"] > 0


def test_the_check_names_what_is_too_much(traffic: ModuleType) -> None:
    def row(dram: int = 100, l2: int = 100, conflicts: int = 0) -> object:
        return traffic.Row("token", "a model", 100, dram, l2, 100, 1000, conflicts, ("project.cuh:1",))

    assert traffic.broken_rules(row(104, 150, 15), 512) == []
    assert "DRAM 1.060 of the floor" in traffic.broken_rules(row(dram=106), 512)[0]
    assert traffic.broken_rules(row(dram=106), 4096) == []
    assert "DRAM 1.110" in traffic.broken_rules(row(dram=111), 4096)[0]
    assert "1.700 of the weights" in traffic.broken_rules(row(l2=170), 512)[0]
    assert "bank conflicts, at project.cuh:1" in traffic.broken_rules(row(conflicts=30), 512)[0]
