"""CudaOps without weights: everything is allocated and launched on a recording device, nothing is read or packed."""

from __future__ import annotations

from m40llm.device.recording import RecordingDevice
from m40llm.gguf import GGUFFile, TensorType
from m40llm.ops.cuda.ops import CudaOps
from m40llm.ops.cuda.pack import FORMATS, CudaMatrix, packed_bytes
from m40llm.ops.cuda.tensor import DeviceTensor


class DryOps(CudaOps):
    """The same buffers and launches as `CudaOps`, from the tensor table alone."""

    def __init__(self, device: RecordingDevice):
        super().__init__(device)
        self._recording = device

    def load_matrix(self, file: GGUFFile, name: str) -> CudaMatrix:
        info = file.tensor(name)
        return self.matrix(name, info.type, info.rows, info.columns)

    load_embedding = load_matrix

    def load_vector(self, file: GGUFFile, name: str) -> DeviceTensor:
        return self.vector(name, file.tensor(name).columns)

    def matrix(self, name: str, kind: TensorType, rows: int, columns: int) -> CudaMatrix:
        """A matrix (N, K) of unknown content; one of each name, as tied weights are."""
        if name not in self._matrices:
            buffer = self._recording.alloc(packed_bytes(kind, rows, columns), name)
            matrix = CudaMatrix(name, kind, FORMATS[kind], rows, columns, buffer)
            self._open.callback(matrix.close)
            self._matrices[name] = matrix
        return self._matrices[name]

    def vector(self, name: str, size: int) -> DeviceTensor:
        """A float32 vector of unknown content."""
        return self._new((size,), "float32", name)
