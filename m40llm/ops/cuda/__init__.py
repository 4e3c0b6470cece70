"""The CUDA backend: hand-written kernels on a `Device`, which is a card or the emulator."""

from m40llm.ops.cuda.ops import CudaOps, check_model

__all__ = ["CudaOps", "check_model"]
