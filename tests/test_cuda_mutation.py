"""Deleting any one barrier of any kernel must make a test red: the emulator's checks and the parity tests see it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m40llm.device import KernelFault
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.sources import KERNEL_DIR
from m40llm.gguf import TensorType
from m40llm.ops.cuda.project import project
from tests.cuda_arrays import Arrays
from tests.cuda_reference import Bench, product_error
from tests.test_cuda_attention import Case
from tests.test_cuda_project import test_gate_and_up_stage_their_product as staged_product
from tests.test_cuda_project import test_gate_up_swiglu as gated_product
from tests.test_cuda_reduce import best, k_best, random

# What orders a block's results before those that another block reads shows on no machine that runs one block after another.
BARRIER = re.compile(r"__sync(?:threads|warp)\(\);(?!  // for other blocks)")
SOURCES = sorted(path for path in KERNEL_DIR.iterdir() if path.suffix in (".cu", ".cuh"))
# The prototype's barriers order what the host and other blocks write meanwhile; in the emulator nothing runs meanwhile.
BESIDE_THE_HOST = "persistent.cu"


def reductions(device: EmulatorDevice) -> None:
    logits = random(2, 9001)
    with Arrays(device) as arrays:
        assert np.array_equal(best(arrays, logits), logits.argmax(axis=1))
        assert np.array_equal(k_best(arrays, logits, 5)[1], np.argsort(-logits, axis=1)[:, :5])


def decode(device: EmulatorDevice) -> None:
    with Arrays(device) as arrays:
        Case(arrays, 3, 1, 64, [300, 40], [1, 1]).decode(splits=1)  # more than one tile of a warp
        Case(arrays, 8, 1, 64, [300], [1]).decode(splits=3)


def prefill(device: EmulatorDevice) -> None:
    with Arrays(device) as arrays:
        Case(arrays, 2, 1, 128, [70], [40]).prefill()  # more than one tile of keys, more than one chunk


def products(rows: int) -> Callable[[EmulatorDevice], None]:
    def run(device: EmulatorDevice) -> None:
        with Bench(device) as bench:
            matrix, x = bench.matrix(TensorType.Q4_0, 40, 2080), bench.activations(rows, 2080)  # several segments of K
            out = bench.empty((rows, 40))
            project(device, bench.tensor(x), [matrix], [out])
            assert product_error(bench.read(out), x, bench.weights["w"]) < 1e-6

    return run


def decode_projections(device: EmulatorDevice) -> None:
    products(7)(device)
    staged_product(device, 4, "Q8_0")  # the epilogue in which a block's rows meet
    gated_product(device, 6, ("Q4_0", "Q4_0"))  # two matrices, and x is too long to stay in shared memory


CASES: dict[str, Callable[[EmulatorDevice], None]] = {
    "warp.cuh": reductions,
    "reduce.cu": reductions,
    "attention_decode.cuh": decode,
    "attention_prefill.cu": prefill,
    "project.cuh": decode_projections,
    "gemm.cuh": products(40),
}


def barriers() -> list[tuple[str, int]]:
    """(file, line) of every barrier."""
    found = []
    for path in SOURCES:
        if path.name == BESIDE_THE_HOST:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [(path.name, number)] * len(BARRIER.findall(line))
    return found


def test_every_file_with_a_barrier_has_a_case() -> None:
    assert {name for name, _ in barriers()} == set(CASES)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mutants do not belong into the user's cache."""
    return tmp_path_factory.mktemp("cache")


def copy_kernels(folder: Path) -> None:
    for path in SOURCES:
        shutil.copy(path, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_as_they_are_pass(name: str, tmp_path: Path, cache: Path) -> None:
    copy_kernels(tmp_path)
    CASES[name](EmulatorDevice("check", kernel_dir=tmp_path, cache_dir=cache))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), barriers())
def test_a_deleted_barrier_is_noticed(name: str, line: int, tmp_path: Path, cache: Path) -> None:
    copy_kernels(tmp_path)
    lines = (tmp_path / name).read_text().splitlines(keepends=True)
    lines[line - 1] = BARRIER.sub(";", lines[line - 1])
    (tmp_path / name).write_text("".join(lines))
    with pytest.raises((KernelFault, AssertionError)):
        CASES[name](EmulatorDevice("check", kernel_dir=tmp_path, cache_dir=cache))
