"""cuBLAS through ctypes: the two multiplications that the project uses.

Not through CuPy, whose binding refuses every cuBLAS call while a stream is being captured; the library itself allows it,
given a workspace that it need not allocate.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from m40llm.device.errors import DeviceError, DeviceUnavailable, install_extra

WORKSPACE_BYTES = 4 << 20

# cublas_api.h and library_types.h
_OP_N, _OP_T = 0, 1
_R_32F, _R_16F = 0, 2
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1
_STATUS = {
    1: "not initialised (no usable driver or card)",
    3: "out of memory",
    7: "invalid value",
    8: "not built for this card",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
# Below `nvidia/` in site-packages, by major version of CUDA.
_LIBRARIES = {12: "cublas/lib/libcublas.so.12", 13: "cu13/lib/libcublas.so.13"}


def find_library(major: int) -> ctypes.CDLL:
    """libcublas of a major CUDA version: the pip package's, else the system's. DeviceUnavailable if there is none."""
    relative = _LIBRARIES[major]
    spec = importlib.util.find_spec("nvidia")
    paths = [Path(root) / relative for root in (spec.submodule_search_locations or () if spec else ())]
    for path in paths:
        if path.exists():
            # libcublas finds its other half by name: it must be in the process already.
            ctypes.CDLL(str(path).replace("libcublas.", "libcublasLt."), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL(Path(relative).name)
    except OSError:
        remedy = f"{install_extra(f'cuda{major}')}, or use --no-cublas"
        raise DeviceUnavailable(f"cuBLAS {major} is not installed", remedy) from None


class Cublas:
    """A handle, bound to the current card of the calling thread. `workspace` is an address of WORKSPACE_BYTES on it."""

    def __init__(self, major: int, workspace: int):
        self._library = find_library(major)
        self._workspace = ctypes.c_void_p(workspace)
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._stream: int | None = None

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise DeviceError(f"{function}: {_STATUS.get(status, 'status')} ({status})")

    def multiply(
        self,
        sizes: tuple[int, int, int],
        addresses: tuple[int, int, int],
        pitches: tuple[int, int, int],
        *,
        half: bool,
        accumulate: bool,
        stream: int,
    ) -> None:
        """Row-major C (m, n) = A (m, k) @ B (n, k)^T [+ C]; A and B float16 if `half`. `stream` is a cudaStream_t."""
        if stream != self._stream:
            self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))
            # cublasSetStream goes back to the default workspace, which a capture could not allocate
            self._call("cublasSetWorkspace_v2", self._handle, self._workspace, ctypes.c_size_t(WORKSPACE_BYTES))
            self._stream = stream
        m, n, k = map(ctypes.c_int, sizes)
        a, b, c = map(ctypes.c_void_p, addresses)
        pitch_a, pitch_b, pitch_c = map(ctypes.c_int, pitches)
        one, beta = ctypes.c_float(1), ctypes.c_float(1 if accumulate else 0)
        # cuBLAS is column-major: it computes C^T (n, m) = B (n, k) @ A^T (k, m); B is transposed, A is as it lies.
        shape = self._handle, _OP_T, _OP_N, n, m, k, ctypes.byref(one)
        if half:
            operands = b, _R_16F, pitch_b, a, _R_16F, pitch_a, ctypes.byref(beta), c, _R_32F, pitch_c
            self._call("cublasGemmEx", *shape, *operands, _COMPUTE_32F, _GEMM_DEFAULT)
        else:
            self._call("cublasSgemm_v2", *shape, b, pitch_b, a, pitch_a, ctypes.byref(beta), c, pitch_c)

    def close(self) -> None:
        """Destroys the handle."""
        self._call("cublasDestroy_v2", self._handle)
