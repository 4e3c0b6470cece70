"""The CPU backend: kernels in Numba, recorded into programs."""

from m40llm.ops.cpu.ops import CpuOps

__all__ = ["CpuOps"]
