"""CpuOps: the Ops protocol on NumPy arrays. Each op records its kernels into the program that `record` is building."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from m40llm.config import ConfigError, ModelConfig
from m40llm.gguf import GGUFFile, dequantize
from m40llm.kv import KVLayout
from m40llm.ops.cpu import elementwise
from m40llm.ops.cpu.arena import Arena
from m40llm.ops.cpu.attention_decode import NOT_RAW, attention_decode, decode_scratch
from m40llm.ops.cpu.attention_prefill import attention_prefill, prefill_scratch
from m40llm.ops.cpu.buffers import DeferredNorm, DeferredRope, EmbeddingTable, RopeTable, Scratch
from m40llm.ops.cpu.embed import embed
from m40llm.ops.cpu.formats import FORMATS
from m40llm.ops.cpu.isa import IsaError, choose_isa
from m40llm.ops.cpu.packing import PackedMatrix, pack_matrix
from m40llm.ops.cpu.program import Kernel, Program, Workers, aligned_empty
from m40llm.ops.cpu.project import Projection, record_gate_up_swiglu, record_project
from m40llm.ops.cpu.quantise import Norm, QuantisedRows, record_quantise
from m40llm.ops.cpu.rope import rope_append, rope_tables
from m40llm.ops.protocol import KVCache, Workspace
from m40llm.plan import PLAN_FIELDS, StepLimits, StepPlan, StepShape, plan_offsets

LARGE_PAGED_KV = 2.0  # times the weights: up to what size keys and values lie in 2 MB pages


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A program and the threads that replay it."""

    program: Program
    workers: Workers

    def run(self) -> None:
        self.program.run(self.workers)


def available_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuOps:
    """One CPU backend: worker threads, an instruction set, scratch.

    Args:
        threads: CPU threads (None: all that the process may use).
        isa: instruction set of the projections, or "auto".
        activation_bits: 16, or 32 for twice the work (see quantise.py).
        on_compile: called with a kernel's name before its first compilation on this machine.

    Raises:
        ConfigError: this machine lacks the instruction set.
    """

    def __init__(
        self,
        threads: int | None = None,
        isa: str = "auto",
        activation_bits: Literal[16, 32] = 16,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        try:
            self._isa = choose_isa(isa)
        except IsaError as error:
            raise ConfigError(f"--cpu-isa: {error}") from error
        self._activation_bits = activation_bits
        self._on_compile = on_compile
        self._workers = Workers(threads or available_threads())
        self._weights = Arena()
        self._program: Program | None = None
        self._scratch: Scratch | None = None
        self._norm: DeferredNorm | None = None
        self._rope: DeferredRope | None = None
        n = self._workers.threads
        self.description = (
            f"CPU ({self._isa.name.lower()}, {n} thread{'s' if n > 1 else ''}, {activation_bits}-bit activations)"
        )

    # -- load time ---------------------------------------------------------------------------------
    def load_matrix(self, file: GGUFFile, name: str) -> PackedMatrix:
        info = file.tensor(name)
        n, k = info.shape
        return pack_matrix(
            lambda start, stop: file.read_rows(name, start, stop),
            info.type,
            n,
            k,
            self._workers,
            self._on_compile,
            self._weights,
        )

    def load_embedding(self, file: GGUFFile, name: str) -> EmbeddingTable:
        info = file.tensor(name)
        return EmbeddingTable(info.type, file.data(name), info.columns)

    def load_vector(self, file: GGUFFile, name: str) -> NDArray[np.float32]:
        return dequantize(file.read_rows(name), file.tensor(name).type).reshape(-1)

    def load_rope(self, config: ModelConfig, max_pos: int) -> RopeTable:
        return RopeTable(*rope_tables(config.rope, max_pos))

    def new_workspace(self, config: ModelConfig, limits: StepLimits) -> Workspace:
        rows, wanted, threads = limits.rows, limits.logit_rows, self._workers.threads

        def f32(*shape: int) -> NDArray[np.float32]:
            return aligned_empty(shape, np.float32)

        widest = max(config.d_model, config.q_width, config.d_ff)
        self._scratch = Scratch(
            rows=QuantisedRows(max(rows, wanted), widest, self._isa, fine=self._activation_bits == 32),
            decode=decode_scratch(threads, config.n_heads, config.n_kv_heads, config.head_dim, config.context_length),
            prefill=prefill_scratch(threads, config.head_dim),
            normed=f32(wanted, config.d_model),
            argmax_values=f32(threads, wanted),
            argmax_places=aligned_empty((threads, wanted), np.int32),
        )
        offsets = plan_offsets(limits)
        packed = aligned_empty(offsets["total"], np.int32)
        return Workspace(
            plan={name: packed[offsets[name] :] for name in PLAN_FIELDS},
            x=f32(rows, config.d_model),
            h=f32(rows, config.d_model),
            q=f32(rows, config.q_width),
            k=f32(rows, config.kv_width),
            v=f32(rows, config.kv_width),
            attn=f32(rows, config.q_width),
            act=f32(rows, config.d_ff),
            logits=f32(wanted, config.vocab_size),
            ids=aligned_empty(wanted, np.int32),
        )

    def new_kv(self, layout: KVLayout) -> KVCache:
        """K and V, all zeros.

        Decode reads them faster from 2 MB pages, but those are committed nearly all with the first token. That is right for
        a cache that is not much beside the weights; a larger one keeps small pages, which come as positions are written.
        """
        small = layout.nbytes <= LARGE_PAGED_KV * self._weights.used

        def cache() -> NDArray:
            return Arena(0).empty(layout.shape, layout.storage) if small else np.zeros(layout.shape, layout.storage)

        return KVCache(layout, cache(), cache())

    # -- a step ------------------------------------------------------------------------------------
    def upload(self, ws: Workspace, plan: StepPlan) -> None:
        for name in PLAN_FIELDS:
            values = getattr(plan, name)
            ws.plan[name][: len(values)] = values

    def record(self, shape: StepShape, body: Callable[[], None]) -> RecordedStep:
        program = self._program = Program(self._on_compile)
        try:
            body()
        finally:
            self._program = self._norm = self._rope = None
        return RecordedStep(program, self._workers)

    def read_ids(self, ws: Workspace, rows: int) -> NDArray[np.int32]:
        return ws.ids[:rows].copy()

    def read_logits(self, ws: Workspace, rows: int) -> NDArray[np.float32]:
        return ws.logits[:rows]

    def read_candidates(self, ws: Workspace, rows: int, count: int) -> None:
        """Logits are in host memory: there is nothing to select before they travel."""

    # -- between steps ---------------------------------------------------------------------------
    def read_kv(self, kv: KVCache, slot: int, start: int, stop: int) -> NDArray:
        return np.stack((kv.k[:, slot, start:stop], kv.v[:, slot, start:stop]))

    def write_kv(self, kv: KVCache, slot: int, start: int, data: NDArray) -> None:
        stop = start + data.shape[2]
        kv.k[:, slot, start:stop], kv.v[:, slot, start:stop] = data

    def copy_kv(self, kv: KVCache, source: int, target: int, start: int, stop: int) -> None:
        for array in (kv.k, kv.v):
            array[:, target, start:stop] = array[:, source, start:stop]

    # -- inside `record` ---------------------------------------------------------------------------
    @property
    def _recording(self) -> tuple[Program, Scratch]:
        if self._program is None or self._scratch is None:
            raise RuntimeError("ops are called inside record(), after new_workspace()")
        return self._program, self._scratch

    def embed(self, table: EmbeddingTable, token_ids: NDArray[np.int32], x: NDArray[np.float32]) -> None:
        program, _ = self._recording
        program.add(embed(table.type), table=table.data, token_ids=token_ids, x=x, rows=len(x), width=table.width)

    def rmsnorm(
        self,
        x: NDArray[np.float32],
        weight: NDArray[np.float32],
        eps: float,
        out: NDArray[np.float32],
        readers: Sequence[PackedMatrix] = (),
    ) -> None:
        self._rmsnorm(x, weight, eps, out, readers, None)

    def _rmsnorm(
        self,
        x: NDArray[np.float32],
        weight: NDArray[np.float32],
        eps: float,
        out: NDArray[np.float32],
        readers: Sequence[PackedMatrix],
        index: NDArray[np.int32] | None,
    ) -> None:
        """Of the rows ``index`` (len(out),) of x, or of all; left to the readers of `out` where all are of quantised types."""
        program, _ = self._recording
        if readers and all(matrix.type in FORMATS for matrix in readers):
            self._norm = DeferredNorm(out, x, index, Norm(weight, eps))
            return
        self._norm = None  # `out` may be the buffer of one that was deferred
        fields = {"rows": len(out), "width": x.shape[1], "eps": eps}
        program.add(elementwise.rmsnorm, x=x, weight=weight, out=out, index=index, **fields)

    def _quantise(self, h: NDArray[np.float32]) -> None:
        """Names h as the input of the next projections; a norm that was left to its readers comes along."""
        program, scratch = self._recording
        if self._norm is not None and self._norm.out is h:
            record_quantise(program, self._norm.x, scratch.rows, self._norm.index, self._norm.norm)
        else:
            record_quantise(program, h, scratch.rows)

    def qkv(
        self,
        h: NDArray[np.float32],
        weights: tuple[PackedMatrix, PackedMatrix, PackedMatrix],
        biases: tuple[NDArray[np.float32] | None, ...],
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
    ) -> None:
        program, scratch = self._recording
        self._quantise(h)
        outputs = zip(weights, (q, k, v), biases, strict=True)
        record_project(program, [Projection(w, out, bias) for w, out, bias in outputs], scratch.rows)

    def rope_append(
        self,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        rope: RopeTable,
        config: ModelConfig,
        kv: KVCache,
        layer: int,
        ws: Workspace,
    ) -> None:
        """Left to `attention`, which does it on the way where all segments are single rows."""
        self._rope = DeferredRope(q, k, v, rope)

    def attention(
        self,
        q: NDArray[np.float32],
        kv: KVCache,
        layer: int,
        shape: StepShape,
        config: ModelConfig,
        ws: Workspace,
        out: NDArray[np.float32],
        readers: Sequence[PackedMatrix] = (),
    ) -> None:
        program, scratch = self._recording
        group, half = config.n_heads // config.n_kv_heads, kv.layout.dtype == "f16"
        if self._rope is None or self._rope.q is not q:
            raise RuntimeError("attention() comes after rope_append() of the same q")
        (new_k, new_v, rope), self._rope = (self._rope.k, self._rope.v, self._rope.table), None
        pairs, pairing = config.rope.dim // 2, config.rope.interleaved
        strides: dict[str, Any] = {"slot_stride": kv.k.strides[1], "pos_stride": kv.k.strides[2]}
        tables: dict[str, Any] = {"cos": rope.cos, "sin": rope.sin, "pairs": pairs}
        by_decode = shape.longest == 1
        if not by_decode:
            rows: dict[str, Any] = {"pos": ws.plan["pos"], "row_slot": ws.plan["row_slot"], "rows": len(q)}
            heads: dict[str, Any] = {
                "heads": config.n_heads,
                "kv_heads": config.n_kv_heads,
                "head_dim": config.head_dim,
            }
            cache: dict[str, Any] = {"k_cache": kv.k[layer], "v_cache": kv.v[layer]}
            program.add(
                rope_append(pairing, half), q=q, k=new_k, v=new_v, **cache, **strides, **rows, **heads, **tables
            )
        fields = {
            "q": q,
            "out": out,
            "k": kv.k[layer],
            "v": kv.v[layer],
            "cu_seqlens": ws.plan["cu_seqlens_q"],
            "kv_lens": ws.plan["kv_lens"],
            "slots": ws.plan["slots"],
            "segments": shape.segments,
            "kv_heads": config.n_kv_heads,
            "window": 0,
            "scale": 1.0 / math.sqrt(config.head_dim),
            **strides,
        }

        def add(kernel: Kernel, buffer: NDArray[np.float32], *, barrier: bool = True, rotated: bool = True) -> None:
            raw = NOT_RAW if rotated else {"new_k": new_k, "new_v": new_v, **tables}
            scratch = {"scratch": buffer, "scratch_stride": buffer.shape[1]}
            program.add(kernel, barrier=barrier, **fields, **scratch, **raw)

        if shape.longest > 1:
            add(attention_prefill(group, config.head_dim, half), scratch.prefill, barrier=shape.segments == 1)
        if by_decode:
            add(attention_decode(group, config.head_dim, half, pairing), scratch.decode, rotated=False)
        elif shape.segments > 1:  # some segment may have a single row
            add(attention_decode(group, config.head_dim, half), scratch.decode)

    def project(
        self,
        h: NDArray[np.float32],
        weight: PackedMatrix,
        out: NDArray[np.float32],
        *,
        bias: NDArray[np.float32] | None = None,
        add: bool = False,
    ) -> None:
        program, scratch = self._recording
        self._quantise(h)
        record_project(program, [Projection(weight, out, bias, add)], scratch.rows)

    def gate_up_swiglu(
        self,
        h: NDArray[np.float32],
        gate: PackedMatrix,
        up: PackedMatrix,
        out: NDArray[np.float32],
        readers: Sequence[PackedMatrix] = (),
    ) -> None:
        program, scratch = self._recording
        self._quantise(h)
        record_gate_up_swiglu(program, gate, up, scratch.rows, out)

    def logits(
        self,
        x: NDArray[np.float32],
        norm: NDArray[np.float32],
        eps: float,
        weight: PackedMatrix,
        ws: Workspace,
        shape: StepShape,
    ) -> None:
        program, scratch = self._recording
        rows = shape.logit_rows
        normed, logits = scratch.normed[:rows], ws.logits[:rows]
        self._rmsnorm(x, norm, eps, normed, (weight,), ws.plan["logit_rows"][:rows])
        self.project(normed, weight, logits)
        fields = {
            "logits": logits,
            "rows": rows,
            "width": logits.shape[1],
            "values": scratch.argmax_values,
            "places": scratch.argmax_places,
            "ids": ws.ids,
        }
        program.add(elementwise.argmax, **fields)
        program.add(elementwise.argmax_merge, **fields)

    def close(self) -> None:
        """Ends the worker threads; may be called twice."""
        self._workers.close()
