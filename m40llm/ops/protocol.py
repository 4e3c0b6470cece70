"""Ops: what the forward pass calls. `ops/cpu` runs it on NumPy arrays, `ops/cuda` launches kernels on a `Device`.

A tensor is the backend's own handle (a NumPy array on the CPU, a device tensor elsewhere); the forward pass only slices
rows (`t[:n]`) and hands tensors back. Activations are FP32. Nothing here allocates: every output is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from m40llm.config import ModelConfig
from m40llm.gguf import GGUFFile
from m40llm.kv import KVLayout
from m40llm.plan import StepLimits, StepPlan, StepShape

Tensor = Any
Matrix = Any  # a weight matrix (N, K) in the backend's packed form


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of one step, allocated once for the largest one. Rows are packed tokens; widths are the model's."""

    plan: dict[str, Tensor]  # the arrays of StepPlan at fixed addresses
    x: Tensor  # (T, D)     f32 residual stream
    h: Tensor  # (T, D)     f32 normalised input of a projection
    q: Tensor  # (T, H*HD)  f32
    k: Tensor  # (T, KH*HD) f32
    v: Tensor  # (T, KH*HD) f32
    attn: Tensor  # (T, H*HD)  f32
    act: Tensor  # (T, F)     f32
    logits: Tensor  # (R, V)     f32
    ids: Tensor  # (R,)       i32 greedy token of each logit row


@dataclass(frozen=True, slots=True)
class KVCache:
    """Dense K and V in the layout's order. `k` and `v` have `layout.shape`."""

    layout: KVLayout
    k: Tensor
    v: Tensor


class Step(Protocol):
    """A recorded step, ready to run on whatever the plan arrays hold now."""

    def run(self) -> None: ...


class Ops(Protocol):
    """One backend. Shapes: T rows, S segments, R logit rows; see STYLE for the other letters."""

    description: str  # device, kernels in use: one line for the user

    # -- load time ---------------------------------------------------------------------------------
    def load_matrix(self, file: GGUFFile, name: str) -> Matrix:
        """Packs tensor `name` (N, K) for `project` and its relatives."""

    def load_embedding(self, file: GGUFFile, name: str) -> Matrix:
        """Makes tensor `name` (V, D) ready for row gathers by `embed`."""

    def load_vector(self, file: GGUFFile, name: str) -> Tensor:
        """Loads a 1-D tensor as f32."""

    def load_rope(self, config: ModelConfig, max_pos: int) -> Tensor:
        """Cosine and sine of every position below `max_pos`."""

    def new_workspace(self, config: ModelConfig, limits: StepLimits) -> Workspace: ...

    def new_kv(self, layout: KVLayout) -> KVCache: ...

    # -- a step ------------------------------------------------------------------------------------
    def upload(self, ws: Workspace, plan: StepPlan) -> None:
        """Copies the plan's arrays to their fixed addresses, in one transfer."""

    def record(self, shape: StepShape, body: Callable[[], None]) -> Step:
        """Turns the ops that `body` calls into a step that can run many times."""

    def read_ids(self, ws: Workspace, rows: int) -> NDArray[np.int32]:
        """The greedy ids (R,); the one place where the host waits for the device."""

    def read_logits(self, ws: Workspace, rows: int) -> NDArray[np.float32]:
        """Logits (R, V) as a host array, valid until the next step; called after `read_ids`, if at all."""

    def read_candidates(
        self, ws: Workspace, rows: int, count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Ids and logits, both (R, count), of each row's largest logits: descending, equals by ascending id.

        None where logits lie in host memory anyhow, or for more of them than the device selects.
        """

    # -- between steps ---------------------------------------------------------------------------
    def read_kv(self, kv: KVCache, slot: int, start: int, stop: int) -> NDArray:
        """K and V of positions `start .. stop` of a slot as a new host array (2, L, n, KH, HD), K first; waits."""

    def write_kv(self, kv: KVCache, slot: int, start: int, data: NDArray) -> None:
        """Stores such an array at positions `start ..` of a slot; it may be changed afterwards."""

    def copy_kv(self, kv: KVCache, source: int, target: int, start: int, stop: int) -> None:
        """Copies K and V of positions `start .. stop` from one slot to another."""

    # -- inside `record` ---------------------------------------------------------------------------
    def embed(self, table: Matrix, token_ids: Tensor, x: Tensor) -> None:
        """x[t] = dequantised row token_ids[t]."""

    # `readers`: all the matrices that will multiply the result next. A backend may then lay `out` out as they like it best;
    # without them it is a plain tensor.
    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, readers: Sequence[Matrix] = ()) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, by rows (Zhang and Sennrich, 2019)."""

    def qkv(
        self,
        h: Tensor,
        weights: tuple[Matrix, Matrix, Matrix],
        biases: tuple[Tensor | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """q, k, v = h @ W.T + bias, one pass over the input."""

    def rope_append(
        self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, config: ModelConfig, kv: KVCache, layer: int, ws: Workspace
    ) -> None:
        """Rotates q in place; rotates k and stores k, v at (layer, row_slot[t], pos[t])."""

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        shape: StepShape,
        config: ModelConfig,
        ws: Workspace,
        out: Tensor,
        readers: Sequence[Matrix] = (),
    ) -> None:
        """Causal grouped-query attention of every segment over its slot's cached positions."""

    def project(self, h: Tensor, weight: Matrix, out: Tensor, *, bias: Tensor | None = None, add: bool = False) -> None:
        """out = h @ W.T + bias, or out += … with `add` (the residual stream)."""

    def gate_up_swiglu(self, h: Tensor, gate: Matrix, up: Matrix, out: Tensor, readers: Sequence[Matrix] = ()) -> None:
        """out = silu(h @ gate.T) * (h @ up.T) (Shazeer, 2020)."""

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, ws: Workspace, shape: StepShape) -> None:
        """ws.logits[r] = rmsnorm(x[logit_rows[r]]) @ W.T and ws.ids[r] = argmax (lowest id among equals)."""

    def close(self) -> None:
        """Releases everything the backend owns; may be called twice."""
