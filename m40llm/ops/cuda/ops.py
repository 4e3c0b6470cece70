"""CudaOps: the Ops protocol on a Device, a card or the emulator. Each op launches kernels; nothing waits but `read_ids`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from m40llm.config import CacheExperiment, ConfigError, KVDtype, ModelConfig
from m40llm.device.protocol import Device
from m40llm.gguf import GGUFFile, dequantize
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda import attention, embed, norm, pack, reduce, rope, tensor
from m40llm.ops.cuda.backend import LARGE_MODEL, ProjectionPlan, Projections
from m40llm.ops.cuda.pack import CudaMatrix
from m40llm.ops.cuda.rope import RopeTable
from m40llm.ops.cuda.staged import MOST_ROWS, Staged, Staging, kernel_formats, staged_floats
from m40llm.ops.cuda.steps import EagerStep, GraphStep
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.ops.protocol import KVCache, Workspace
from m40llm.ops.rope_table import rope_tables
from m40llm.plan import PLAN_FIELDS, StepLimits, StepPlan, StepShape, plan_offsets


def check_model(config: ModelConfig, kv_dtype: KVDtype) -> None:
    """Raises ConfigError for a model or a KV type that the CUDA kernels cannot run, before anything is loaded."""
    try:
        attention.check_heads(config.n_heads, config.n_kv_heads, config.head_dim)
        rope.check_pairs(config.rope.dim // 2, config.head_dim)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if kv_dtype != "f16":
        raise ConfigError(
            f"--kv-dtype {kv_dtype}: the CUDA kernels store keys and values as f16; use it or --device cpu"
        )


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Buffers inside ops, sized with the workspace."""

    packed: DeviceTensor  # (total,) i32, the plan's arrays as `plan_offsets` has them
    offsets: dict[str, int]
    normed: DeviceTensor  # (R, D) f32 normalised rows whose logits are wanted
    attention: attention.Scratch
    argmax: reduce.ReduceScratch
    topk: reduce.ReduceScratch
    candidates: DeviceTensor  # (2 · R · most,) i32: of each selection first the ids, then the bits of the logits
    staging: Staging  # of h, attn, act and normed


class CudaOps:
    """The backend of one session: owns the device and every buffer on it, the weights' included.

    Args:
        device: closed together with the backend unless `owns_device` is false.
        decode_graph: capture decode steps (one row per sequence) as CUDA graphs.
        cache_experiment: "ldg" loads norms, "ldg_kv" loads K and V through the read-only cache.
        projections: which matrices are kept in FP32 too.
        time_replays: log how long each replay of a graph took, which costs a wait.
    """

    def __init__(
        self,
        device: Device,
        *,
        decode_graph: bool = False,
        cache_experiment: CacheExperiment = "off",
        projections: ProjectionPlan = LARGE_MODEL,
        time_replays: bool = False,
        owns_device: bool = True,
    ):
        self._device = device
        self._time_replays = time_replays
        self._decode_graph = decode_graph
        self._norm_ldg = cache_experiment == "ldg"
        self._kv_ldg = cache_experiment == "ldg_kv"
        self._open = ExitStack()
        if owns_device:
            self._open.callback(device.close)
        self._projections = Projections(device, projections, self._open)
        self._matrices: dict[str, CudaMatrix] = {}
        self._graphs: weakref.WeakSet[GraphStep] = weakref.WeakSet()
        # Decode attention of a mixed step runs beside its prefill attention: different rows, different bottlenecks.
        self._side = device.stream(priority=-1)
        self._fork, self._join = device.event(), device.event()
        self._scratch: _Scratch | None = None
        extras = "".join((", decode graphs" * decode_graph, f", {cache_experiment}" * (cache_experiment != "off")))
        self.description = f"{device.name} ({device.arch}, {projections.backend}{extras})"

    # -- load time -----------------------------------------------------------------------------------
    def load_matrix(self, file: GGUFFile, name: str) -> CudaMatrix:
        """A tied embedding and output projection are one matrix."""
        if name not in self._matrices:
            matrix = pack.load_matrix(file, name, self._device)
            self._open.callback(matrix.close)
            self._matrices[name] = matrix
            self._projections.load(file, matrix)
        return self._matrices[name]

    load_embedding = load_matrix

    def load_vector(self, file: GGUFFile, name: str) -> DeviceTensor:
        return self._put(dequantize(file.read_rows(name), file.tensor(name).type).reshape(-1), name)

    def load_rope(self, config: ModelConfig, max_pos: int) -> RopeTable:
        cos, sin = rope_tables(config.rope, max_pos)
        return RopeTable(self._put(cos, "RoPE cosine"), self._put(sin, "RoPE sine"), config.rope.interleaved)

    def new_workspace(self, config: ModelConfig, limits: StepLimits) -> Workspace:
        rows, wanted, vocab = limits.rows, limits.logit_rows, config.vocab_size
        most = reduce.most_candidates(vocab)

        def f32(name: str, *shape: int) -> DeviceTensor:
            return self._new(shape, np.float32, name)

        offsets = plan_offsets(limits)
        # the cache may be shorter than the model's context: then fewer partial results are used
        places = attention.scratch_places(
            self._device, limits.segments, config.n_heads, config.n_kv_heads, config.context_length
        )
        h, attn = f32("h", rows, config.d_model), f32("attn", rows, config.q_width)
        act, normed = f32("act", rows, config.d_ff), f32("normalised rows of the logits", wanted, config.d_model)
        blocks = attention.counters_per_segment(config.n_kv_heads, config.n_heads // config.n_kv_heads)
        scratch = _Scratch(
            packed=self._new((offsets["total"],), np.int32, "plan"),
            offsets=offsets,
            normed=normed,
            attention=attention.Scratch(
                f32("partial attention", places * config.head_dim),
                f32("partial softmax", places, 2),
                self._put(np.zeros(limits.segments * blocks, np.uint32), "attention counters"),
            ),
            argmax=reduce.ReduceScratch(
                self._new((wanted * reduce.argmax_blocks(vocab),), np.uint64, "partial argmax"),
                self._put(np.zeros(wanted, np.uint32), "argmax counters"),
            ),
            topk=reduce.ReduceScratch(
                self._new((wanted * reduce.topk_partials(vocab, most),), np.uint64, "partial candidates"),
                self._put(np.zeros(wanted, np.uint32), "candidate counters"),
            ),
            candidates=self._new((2 * wanted * most,), np.int32, "candidates"),
            staging=Staging(
                {t.memory.ptr: self._stage(t, versions) for t, versions in ((h, 2), (attn, 1), (act, 1), (normed, 1))}
            ),
        )
        self._scratch = scratch
        self._projections.new_workspace(config, limits)
        return Workspace(
            plan={name: scratch.packed[offsets[name] : offsets["total"]] for name in PLAN_FIELDS},
            x=f32("x", rows, config.d_model),
            h=h,
            q=f32("q", rows, config.q_width),
            k=f32("k", rows, config.kv_width),
            v=f32("v", rows, config.kv_width),
            attn=attn,
            act=act,
            logits=f32("logits", wanted, vocab),
            ids=self._new((wanted,), np.int32, "ids"),
        )

    def new_kv(self, layout: KVLayout) -> KVCache:
        if layout.dtype != "f16":
            raise ConfigError(f"--kv-dtype {layout.dtype}: the CUDA kernels store keys and values as f16")
        storage = layout.storage
        return KVCache(layout, self._new(layout.shape, storage, "K cache"), self._new(layout.shape, storage, "V cache"))

    # -- a step --------------------------------------------------------------------------------------
    def upload(self, ws: Workspace, plan: StepPlan) -> None:
        scratch = self._buffers()
        host = np.zeros(scratch.packed.shape, np.int32)
        for name in PLAN_FIELDS:
            values = getattr(plan, name)
            host[scratch.offsets[name] : scratch.offsets[name] + len(values)] = values
        self._device.upload(scratch.packed.memory, host)

    def record(self, shape: StepShape, body: Callable[[], None]) -> EagerStep | GraphStep:
        if not (self._decode_graph and shape.longest == 1):
            return EagerStep(body)
        step = GraphStep(self._device, body, self._time_replays)
        self._graphs.add(step)
        return step

    def read_ids(self, ws: Workspace, rows: int) -> NDArray[np.int32]:
        """Waits, unless there is nothing to read: a chunk of a prompt that wants no logits only enqueues its work."""
        return tensor.download(self._device, ws.ids[:rows]) if rows else np.empty(0, np.int32)

    def read_logits(self, ws: Workspace, rows: int) -> NDArray[np.float32]:
        return (
            tensor.download(self._device, ws.logits[:rows]) if rows else np.empty((0, ws.logits.shape[1]), np.float32)
        )

    def read_candidates(
        self, ws: Workspace, rows: int, count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Selects on the device, in a launch of its own: another wait, but a few hundred bytes instead of megabytes."""
        if not rows or count > reduce.most_candidates(ws.logits.shape[1]):
            return None
        scratch = self._buffers()
        both = scratch.candidates[: 2 * rows * count]
        ids = both[: rows * count].reshape(rows, count)
        values = DeviceTensor(both[rows * count :].memory, (rows, count), np.dtype(np.float32))
        reduce.topk(self._device, ws.logits[:rows], values, ids, scratch.topk)
        host = tensor.download(self._device, both).reshape(2, rows, count)
        return host[0], host[1].view(np.float32)

    # -- between steps -------------------------------------------------------------------------------
    def read_kv(self, kv: KVCache, slot: int, start: int, stop: int) -> NDArray[Any]:
        layout = kv.layout
        data = np.empty((2, layout.n_layers, stop - start, layout.n_kv_heads, layout.head_dim), layout.storage)
        for half, cached in zip(data, (kv.k, kv.v), strict=True):
            for layer, out in enumerate(half):
                at = layout.offset(layer, slot, start) * layout.storage.itemsize
                out[...] = self._device.download(cached.memory, out.shape, out.dtype, at)
        return data

    def write_kv(self, kv: KVCache, slot: int, start: int, data: NDArray[Any]) -> None:
        layout = kv.layout
        for half, cached in zip(data, (kv.k, kv.v), strict=True):
            for layer, rows in enumerate(half):
                at = layout.offset(layer, slot, start) * layout.storage.itemsize
                self._device.upload(cached.memory, rows, at)

    def copy_kv(self, kv: KVCache, source: int, target: int, start: int, stop: int) -> None:
        layout = kv.layout
        item = layout.storage.itemsize
        nbytes = (stop - start) * layout.pos_stride * item
        for cached in (kv.k, kv.v):
            for layer in range(layout.n_layers):
                src = cached.memory.view(layout.offset(layer, source, start) * item, nbytes)
                dst = cached.memory.view(layout.offset(layer, target, start) * item, nbytes)
                self._device.copy(dst, src, nbytes)

    # -- inside `record` -----------------------------------------------------------------------------
    def embed(self, table: CudaMatrix, token_ids: DeviceTensor, x: DeviceTensor) -> None:
        embed.embed(self._device, table, token_ids, x)

    def rmsnorm(
        self,
        x: DeviceTensor,
        weight: DeviceTensor,
        eps: float,
        out: DeviceTensor,
        readers: Sequence[CudaMatrix] = (),
    ) -> None:
        target = self._buffers().staging.target(out, readers)
        norm.rmsnorm(self._device, x, weight, eps, target, ldg=self._norm_ldg)

    def qkv(
        self,
        h: DeviceTensor,
        weights: tuple[CudaMatrix, CudaMatrix, CudaMatrix],
        biases: tuple[DeviceTensor | None, ...],
        q: DeviceTensor,
        k: DeviceTensor,
        v: DeviceTensor,
    ) -> None:
        self._projections.project(self._source(h), weights, (q, k, v), biases)

    def rope_append(
        self,
        q: DeviceTensor,
        k: DeviceTensor,
        v: DeviceTensor,
        rope_table: RopeTable,
        config: ModelConfig,
        kv: KVCache,
        layer: int,
        ws: Workspace,
    ) -> None:
        rows = len(q)
        positions = rope.Positions(ws.plan["pos"][:rows], ws.plan["row_slot"][:rows])
        rope.rope_append(self._device, q, k, v, rope_table, positions, kv, layer)

    def attention(
        self,
        q: DeviceTensor,
        kv: KVCache,
        layer: int,
        shape: StepShape,
        config: ModelConfig,
        ws: Workspace,
        out: DeviceTensor,
        readers: Sequence[CudaMatrix] = (),
    ) -> None:
        device, count, scratch = self._device, shape.segments, self._buffers()
        segments = attention.Segments(
            ws.plan["cu_seqlens_q"][: count + 1], ws.plan["kv_lens"][:count], ws.plan["slots"][:count]
        )
        target = scratch.staging.target(out, readers if shape.longest == 1 else ())
        if shape.longest == 1:
            attention.attention_decode(device, q, kv, layer, segments, scratch.attention, target, ldg=self._kv_ldg)
            return
        mixed = count > 1  # a single segment is known to be a long one
        if mixed:
            device.record(self._fork)
            device.wait(self._fork, self._side)
            attention.attention_decode(
                device, q, kv, layer, segments, scratch.attention, out, ldg=self._kv_ldg, stream=self._side
            )
            device.record(self._join, self._side)
        attention.attention_prefill(device, q, kv, layer, segments, shape.longest, out)
        if mixed:
            device.wait(self._join)

    def project(
        self,
        h: DeviceTensor,
        weight: CudaMatrix,
        out: DeviceTensor,
        *,
        bias: DeviceTensor | None = None,
        add: bool = False,
    ) -> None:
        self._projections.project(self._source(h), (weight,), (out,), (bias,), add=add)

    def gate_up_swiglu(
        self,
        h: DeviceTensor,
        gate: CudaMatrix,
        up: CudaMatrix,
        out: DeviceTensor,
        readers: Sequence[CudaMatrix] = (),
    ) -> None:
        together = readers if kernel_formats((gate, up)) else ()
        target = self._buffers().staging.target(out, together)
        self._projections.gate_up_swiglu(self._source(h), gate, up, target)

    def logits(
        self,
        x: DeviceTensor,
        norm_weight: DeviceTensor,
        eps: float,
        weight: CudaMatrix,
        ws: Workspace,
        shape: StepShape,
    ) -> None:
        rows, scratch = shape.logit_rows, self._buffers()
        normed, logits = scratch.normed[:rows], ws.logits[:rows]
        wanted = ws.plan["logit_rows"][:rows]
        target = scratch.staging.target(normed, (weight,))
        norm.rmsnorm(self._device, x, norm_weight, eps, target, rows=wanted, ldg=self._norm_ldg)
        self._projections.project(target, (weight,), (logits,))
        reduce.argmax(self._device, logits, ws.ids[:rows], scratch.argmax)

    def close(self) -> None:
        """Frees graphs and buffers and closes the device if it is owned; may be called twice."""
        for step in list(self._graphs):
            step.close()
        self._matrices.clear()
        self._open.close()

    # -- buffers -------------------------------------------------------------------------------------
    def _source(self, h: DeviceTensor) -> DeviceTensor | Staged:
        return self._buffers().staging.source(h)

    def _stage(self, t: DeviceTensor, versions: int) -> DeviceTensor:
        """Room for up to MOST_ROWS rows of `t` staged for so many formats. Zeros: rows that a step lacks are read, too."""
        return self._put(np.zeros(versions * staged_floats(t.shape[1], MOST_ROWS), np.float32), "staged rows")

    def _buffers(self) -> _Scratch:
        if self._scratch is None:
            raise RuntimeError("a step needs new_workspace() first")
        return self._scratch

    def _new(self, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> DeviceTensor:
        buffer, result = tensor.empty(self._device, shape, dtype, name)
        self._open.enter_context(buffer)
        return result

    def _put(self, values: NDArray[Any], name: str) -> DeviceTensor:
        result = self._new(values.shape, values.dtype, name)
        tensor.upload(self._device, result, values)
        return result
