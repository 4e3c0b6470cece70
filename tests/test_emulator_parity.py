"""Whole kernels in the emulator against float64 NumPy, in every mode and thread order; and with each barrier deleted."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from m40llm.device import KernelFault
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_build import Mode

KERNELS = Path(__file__).parent / "kernels"


def launch(
    device: EmulatorDevice,
    module: str,
    symbol: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    inputs: list[npt.NDArray],
    out_shape: tuple[int, ...],
    scalars: tuple[np.generic, ...],
    shared: int = 0,
) -> npt.NDArray:
    """Uploads the inputs, launches with (inputs, output, scalars), downloads the float32 output."""
    kernel = device.kernel(module, symbol)
    with ExitStack() as stack:
        buffers = [stack.enter_context(device.alloc(a.nbytes, f"in{i}")) for i, a in enumerate(inputs)]
        for buffer, array in zip(buffers, inputs, strict=True):
            device.upload(buffer, array)
        out = stack.enter_context(device.alloc(4 * int(np.prod(out_shape)), "out"))
        device.launch(kernel, grid, block, (*buffers, out, *scalars), shared)
        return device.download(out, out_shape, np.float32)


def relative_error(got: npt.NDArray, want: npt.NDArray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def gemv(device: EmulatorDevice, symbol: str = "gemv_q8_0") -> float:
    """y (70,) = W (70, 288) Q8_0 @ x."""
    rng, n, k = np.random.default_rng(0), 70, 288
    scale = (rng.random((n, k // 32, 1)) * 0.01).astype(np.float16)
    quants = rng.integers(-127, 128, (n, k // 32, 32)).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=2)
    x = rng.standard_normal(k).astype(np.float32)
    grid = n if symbol == "gemv_q8_0" else -(-n // 4)
    y = launch(device, "gemv_q8_0", symbol, grid, 128, [raw, x], (n,), (np.int32(k), np.int32(n)))
    weights = scale.astype(np.float64) * quants
    return relative_error(y, weights.reshape(n, k) @ x.astype(np.float64))


def gemm(device: EmulatorDevice) -> float:
    """C (70, 50) = A (70, 36) @ B^T: no size is a multiple of the tile."""
    rng, m, n, k = np.random.default_rng(1), 70, 50, 36
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    sizes = np.int32(m), np.int32(n), np.int32(k)
    c = launch(device, "gemm_tiled", "gemm_nt", (-(-n // 64), -(-m // 64)), (16, 16), [a, b], (m, n), sizes)
    return relative_error(c, a.astype(np.float64) @ b.astype(np.float64).T)


def attention(device: EmulatorDevice, head: int = 64, heads: int = 6, kv_heads: int = 2, length: int = 150) -> float:
    """Decode attention over `length` positions of an FP16 cache (kv_heads, slots, head), in chunks of 64."""
    rng, slots, chunk, group = np.random.default_rng(2), length + 7, 64, heads // kv_heads
    q = rng.standard_normal((heads, head)).astype(np.float32)
    k, v = (rng.standard_normal((kv_heads, slots, head)).astype(np.float16) for _ in range(2))
    scale = np.float32(head**-0.5)
    scalars = np.int32(length), np.int32(slots), np.int32(group), scale, np.int32(chunk)
    symbol, shared = f"attn_decode_{head}", 4 * (chunk + head)
    y = launch(device, "attention", symbol, heads, 128, [q, k, v], q.shape, scalars, shared)
    keys, values = (np.repeat(x[:, :length].astype(np.float64), group, axis=0) for x in (k, v))
    scores = np.einsum("hd,htd->ht", q, keys) * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    want = np.einsum("ht,htd->hd", weights / weights.sum(1, keepdims=True), values)
    return relative_error(y, want)


def gemv_warp(device: EmulatorDevice) -> float:
    return gemv(device, "gemv_q8_0_warp")


def attention_128(device: EmulatorDevice) -> float:
    return attention(device, 128, 8, 2, 77)


CASES = (gemv, gemv_warp, gemm, attention, attention_128)
RUNS = [
    ("fast", "forward", 0),
    ("fast", "reverse", 0),
    ("fast", "random", 1),
    ("check", "random", 2),
    ("kasan", "forward", 0),
]


@pytest.mark.parametrize(("mode", "order", "seed"), RUNS)
@pytest.mark.parametrize("case", CASES)
def test_parity(case: Callable[[EmulatorDevice], float], mode: Mode, order: str, seed: int) -> None:
    device = EmulatorDevice(mode, kernel_dir=KERNELS, order=order, seed=seed)
    assert case(device) < 2e-6
    assert device.live_buffers() == []


def barriers() -> list[tuple[str, int]]:
    """(module, index) of every barrier in the kernels above."""
    found = []
    for module in ("gemv_q8_0", "gemm_tiled", "attention"):
        text = (KERNELS / f"{module}.cu").read_text()
        found += [(module, i) for i in range(len(re.findall(r"__syncthreads\(\);", text)))]
    return found


@pytest.fixture(scope="module")
def mutant_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps mutants out of the user's cache, and the runtime built once."""
    return tmp_path_factory.mktemp("mutants")


@pytest.mark.parametrize(("module", "index"), barriers())
def test_a_deleted_barrier_is_found(module: str, index: int, tmp_path: Path, mutant_cache: Path) -> None:
    """Random thread order alone misses some of these: the checker judges order, it does not wait for it to matter."""
    text = (KERNELS / f"{module}.cu").read_text()
    barrier = list(re.finditer(r"__syncthreads\(\);", text))[index]
    (tmp_path / f"{module}.cu").write_text(text[: barrier.start()] + text[barrier.end() :])
    device = EmulatorDevice("check", kernel_dir=tmp_path, cache_dir=mutant_cache)
    case = {"gemv_q8_0": gemv, "gemm_tiled": gemm, "attention": attention}[module]
    with pytest.raises(KernelFault, match=r"race|uninitialised"):
        case(device)
