"""What the CPU ops hold on to: tables of a model, scratch, and work that is left to the op that follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m40llm.gguf import TensorType
from m40llm.ops.cpu.quantise import Norm, QuantisedRows


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Token embeddings as the file has them: only the rows in use are ever read."""

    type: TensorType
    data: NDArray[np.uint8]  # (V, row bytes), a view of the mapped file
    width: int  # D


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin: (positions, dim/2) float32."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers inside ops, sized with the workspace."""

    rows: QuantisedRows
    decode: NDArray[np.float32]
    prefill: NDArray[np.float32]
    normed: NDArray[np.float32]  # (R, D)
    argmax_values: NDArray[np.float32]
    argmax_places: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """`out` = norm of x, or of its rows `index`, left to whatever quantises `out` for its readers."""

    out: NDArray[np.float32]
    x: NDArray[np.float32]
    index: NDArray[np.int32] | None
    norm: Norm


@dataclass(frozen=True, slots=True)
class DeferredRope:
    """Rotation of q and k and the append of k and v, left to the attention that follows."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    table: RopeTable
