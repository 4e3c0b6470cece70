"""Builds every kernel for given architectures ahead of time and says what each takes on its card."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from m40llm.device import nvrtc
from m40llm.device.errors import DeviceUnavailable
from m40llm.device.occupancy import occupancy
from m40llm.device.sources import KERNEL_DIR, kernel_modules, kernel_source

ARCHS = ("sm_52", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90")


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """One kernel on one architecture. Bytes: spills per thread (stores and loads), shared memory per block.

    `threads` is the largest block that the kernel is launched with; `blocks_per_sm`, `occupancy` (a fraction of the
    multiprocessor's warps) and `limited_by` belong to it.
    """

    module: str
    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    constant_bytes: int
    stack_bytes: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    limited_by: str


def compile_module(
    module: str,
    arch: str,
    *,
    cuda_major: int | None = None,
    cache_dir: Path | None = None,
    kernel_dir: Path = KERNEL_DIR,
) -> list[BuiltKernel]:
    """Builds one module, or finds it in the cache. Raises KernelCompileError, DeviceUnavailable (see `nvrtc.compile`)."""
    compiler = _compiler(arch, cuda_major)
    compiled = nvrtc.compile(kernel_source(module, kernel_dir), arch, nvrtc=compiler, cache_dir=cache_dir)
    built = []
    for kernel in compiled.kernels:
        threads = compiled.signatures[kernel.name].max_threads or 1024
        on_card = occupancy(kernel.registers, kernel.shared_bytes, threads, arch)
        built.append(
            BuiltKernel(
                module=module,
                name=kernel.name,
                arch=arch,
                registers=kernel.registers,
                spill_bytes=kernel.spill_store_bytes + kernel.spill_load_bytes,
                shared_bytes=kernel.shared_bytes,
                constant_bytes=kernel.constant_bytes,
                stack_bytes=kernel.stack_bytes,
                threads=threads,
                blocks_per_sm=on_card.blocks,
                occupancy=on_card.fraction,
                limited_by=on_card.limited_by,
            )
        )
    return built


def _compiler(arch: str, cuda_major: int | None) -> nvrtc.Nvrtc:
    if cuda_major is None:
        return nvrtc.for_arch(arch)
    compiler = nvrtc.load(cuda_major)
    if nvrtc.parse_arch(arch) not in compiler.archs:
        raise DeviceUnavailable(
            f"NVRTC {compiler.version[0]}.{compiler.version[1]} cannot compile for {arch}",
            f"it knows sm_{min(compiler.archs)} to sm_{max(compiler.archs)}; try the other CUDA version",
        )
    return compiler


def compile_all(
    archs: Sequence[str],
    *,
    modules: Sequence[str] | None = None,
    cuda_major: int | None = None,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[BuiltKernel]:
    """Every kernel of every module for every architecture, sorted; NVRTC runs on all cores.

    Args:
        modules: only these (None: all).
        cuda_major: of the NVRTC to use (None: the newest installed one that targets the architecture).
        progress: called with (modules done, modules in all).

    Raises:
        KernelCompileError: with the compiler's log. DeviceUnavailable: no installed NVRTC targets an architecture.
        DeviceError: an architecture that nobody knows.
    """
    for arch in archs:
        _compiler(arch, cuda_major)  # refuses what it cannot do before anything is built
    jobs = [(module, arch) for arch in archs for module in modules or kernel_modules()]
    kernels: list[BuiltKernel] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(compile_module, m, a, cuda_major=cuda_major, cache_dir=cache_dir) for m, a in jobs]
        for done, future in enumerate(futures, 1):
            kernels += future.result()
            if progress:
                progress(done, len(jobs))
    return sorted(kernels, key=lambda k: (archs.index(k.arch), k.module, k.name))
