"""Counted memory traffic of the CUDA kernels, in the emulator: what a Tesla M40 would move, without one.

    python bench/traffic.py                          # kernels, and a decode token of three models
    python bench/traffic.py --check                  # fails where a token moves more than it may
    python bench/traffic.py --check --small          # the same for small shapes: seconds
    python bench/traffic.py --model qwen2.5-3b-q8_0 --context 4096

The floor is every needed byte once: the weights as the GGUF file stores them, the keys and values attended to, the operands of
a kernel. DRAM bytes come from a model of the card's L2 (3 MB, least recently used out first), L2 bytes from the sectors that
each warp access touches; m40llm/device/emulator_traffic.py says what the model leaves out. A model is run with one layer of each
kind, and the layers' traffic is multiplied by their numbers. Each token starts with an empty L2.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

import click
import numpy as np
from shapes import SHAPES, ModelShape

from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_traffic import LaunchTraffic
from m40llm.gguf import BLOCKS, TensorType
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda import CudaOps, norm, project, reduce, tensor
from m40llm.ops.cuda.pack import FORMATS, CudaMatrix, packed_bytes
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.ops.protocol import KVCache
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.weights import LayerWeights, ModelWeights

MOST_DRAM = ((512, 1.05), (4096, 1.10))  # times the floor, at contexts up to this
MOST_L2 = 1.6  # times the weights' bytes
MOST_CONFLICTS = 0.02  # of shared memory's passes: more than a prologue or an epilogue has, so it is an inner loop
HALF = 0x2C  # a byte that, twice, is a float16 near 1/16: keys and values that neither overflow nor vanish


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. Bytes; `floor` is every needed byte once."""

    what: str
    shape: str
    floor: int
    dram: int
    l2_to_sm: int
    l2_floor: int
    shared_passes: int
    bank_conflicts: int  # of these
    places: tuple[str, ...]  # of the conflicts

    @property
    def dram_ratio(self) -> float:
        return self.dram / self.floor

    @property
    def conflict_share(self) -> float:
        return self.bank_conflicts / max(1, self.shared_passes)

    @property
    def l2_ratio(self) -> float:
        return self.l2_to_sm / self.l2_floor


class Bench:
    """An emulated device in traffic mode, with buffers of random content."""

    def __init__(self) -> None:
        self.device = EmulatorDevice("traffic")
        self._rng = np.random.default_rng(0)
        self._open = ExitStack()
        # bytes below 0x40: every float16 and float32 among them is finite and moderate
        self._bytes = self._rng.integers(0, 0x40, 1 << 20, dtype=np.uint8)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self.device.close()

    def matrix(self, name: str, kind: TensorType, rows: int, columns: int) -> CudaMatrix:
        nbytes = packed_bytes(kind, rows, columns)
        buffer = self._open.enter_context(self.device.alloc(nbytes, name))
        for at in range(0, nbytes, len(self._bytes)):
            self.device.upload(buffer, self._bytes[: min(len(self._bytes), nbytes - at)], at)
        return CudaMatrix(name, kind, FORMATS[kind], rows, columns, buffer)

    def vector(self, name: str, *shape: int) -> DeviceTensor:
        result = self.empty(name, shape)
        tensor.upload(self.device, result, self._rng.standard_normal(shape).astype(np.float32))
        return result

    def empty(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> DeviceTensor:
        buffer, result = tensor.empty(self.device, shape, dtype, name)
        self._open.enter_context(buffer)
        return result

    def fill_cache(self, kv: KVCache) -> None:
        for cache in (kv.k, kv.v):
            self.device.fill(cache.memory, HALF)

    def integers(self, name: str, *values: int) -> DeviceTensor:
        result = self.empty(name, (len(values),), np.int32)
        tensor.upload(self.device, result, np.array(values, np.int32))
        return result

    def start(self) -> None:
        self.device.traffic.clear(keep_l2=False)

    def row(self, what: str, shape: str, floor: int, l2_floor: int | None = None) -> Row:
        """What has been launched since `start`."""
        return summed(what, shape, self.device.traffic.report(), floor, floor if l2_floor is None else l2_floor)


def summed(what: str, shape: str, launches: Sequence[LaunchTraffic], floor: int, l2_floor: int) -> Row:
    places = {c.source: None for launch in launches for c in launch.conflicts}
    return Row(
        what=what,
        shape=shape,
        floor=floor,
        dram=sum(launch.dram for launch in launches),
        l2_to_sm=sum(launch.l2_to_sm for launch in launches),
        l2_floor=l2_floor,
        shared_passes=sum(launch.shared_passes for launch in launches),
        bank_conflicts=sum(launch.bank_conflicts for launch in launches),
        places=tuple(places),
    )


def file_bytes(kind: TensorType, rows: int, columns: int) -> int:
    return rows * BLOCKS[kind].row_bytes(columns)


# ---- kernels -----------------------------------------------------------------------------------------------------------


def projection_row(kind: TensorType, n: int, k: int, rows: int) -> Row:
    with Bench() as bench:
        matrix, x, y = bench.matrix("w", kind, n, k), bench.vector("x", rows, k), bench.empty("y", (rows, n))
        bench.start()
        project.project(bench.device, x, [matrix], [y])
        floor = file_bytes(kind, n, k)
        launch = bench.device.traffic.report()[0].kernel
        return bench.row(launch, f"{rows} x {k} -> {n}", floor + 4 * rows * k, floor)


def attention_row(h: int, kh: int, hd: int, length: int) -> Row:
    """One query token at the end of `length` keys."""
    shape = ModelShape("attention", "llama", 64, h, kh, hd, 64, 256, (), TensorType.F32, TensorType.F32)
    config, plan = shape.config(1, length), StepPlan.pack([Segment(0, length - 1, [0])])
    with Bench() as bench, closing(CudaOps(bench.device, owns_device=False)) as ops:
        ws = ops.new_workspace(config, StepLimits(rows=1, segments=1, logit_rows=1))
        kv = ops.new_kv(KVLayout.for_model(config, 1, length, "f16"))
        bench.fill_cache(kv)
        ops.upload(ws, plan)
        q = bench.vector("q", 1, h * hd)
        bench.start()
        ops.attention(q, kv, 0, plan.shape, config, ws, ws.attn)
        launch = bench.device.traffic.report()[0].kernel
        floor = kv.layout.bytes_per_token * length
        return bench.row(launch, f"{h}:{kh} heads, {length} keys", floor + 4 * h * hd, floor)


def small_rows(d: int, v: int) -> list[Row]:
    """Kernels that read and write activations only."""
    with Bench() as bench:
        x, weight, out = bench.vector("x", 1, d), bench.vector("weight", d), bench.empty("out", (1, d))
        bench.start()
        norm.rmsnorm(bench.device, x, weight, 1e-5, out)
        rows = [bench.row("rmsnorm_f32", f"1 x {d}", 8 * d)]
        logits, ids = bench.vector("logits", 1, v), bench.integers("ids", 0)
        scratch = reduce.ReduceScratch(
            bench.empty("partial", (reduce.argmax_blocks(v),), np.uint64), bench.integers("done", 0)
        )
        done = DeviceTensor(scratch.done.memory, (1,), np.dtype(np.uint32))
        bench.start()
        reduce.argmax(bench.device, logits, ids, reduce.ReduceScratch(scratch.partial, done))
        return [*rows, bench.row("argmax_f32", f"1 x {v}", 4 * v)]


# ---- a token -------------------------------------------------------------------------------------------------------------


def weights_of(bench: Bench, ops: CudaOps, shape: ModelShape, context: int) -> ModelWeights:
    layers = []
    for i, kind in enumerate(shape.layers):
        m = {name: bench.matrix(f"blk.{i}.{name}.weight", t, n, k) for name, t, n, k in shape.layer_matrices(kind)}
        sizes = {part: m[f"attn_{part}"].rows for part in "qkv"}
        biases = {
            f"attn_{p}_bias": bench.vector(f"blk.{i}.attn_{p}.bias", n) if shape.biased else None
            for p, n in sizes.items()
        }
        norms = {name: bench.vector(f"blk.{i}.{name}.weight", shape.d) for name in ("attn_norm", "ffn_norm")}
        layers.append(LayerWeights(**m, **biases, **norms))
    table = bench.matrix("token_embd.weight", shape.embedding, shape.v, shape.d)
    head = table if shape.tied else bench.matrix("output.weight", shape.head, shape.v, shape.d)
    config = shape.config(len(layers), context)
    return ModelWeights(
        table, tuple(layers), bench.vector("output_norm.weight", shape.d), head, ops.load_rope(config, context)
    )


def launches_by_layer(launches: Sequence[LaunchTraffic], layers: int) -> list[list[LaunchTraffic]]:
    """Before the layers, each layer, behind them. A part begins with the launch that first reads one of its weights."""
    marks = [f"blk.{i}." for i in range(layers)] + ["output_norm"]
    parts: list[list[LaunchTraffic]] = [[]]
    for launch in launches:
        while marks and any(b.name.startswith(marks[0]) for b in launch.buffers):
            marks.pop(0)
            parts.append([])
        parts[-1].append(launch)
    if marks:
        raise click.ClickException(f"no launch reads '{marks[0]}': the step does not look like a model's")
    return parts


def token_row(shape: ModelShape, context: int) -> Row:
    """One decode token at position `context` - 1."""
    layers = len(shape.layers)
    with Bench() as bench:
        ops = CudaOps(bench.device, owns_device=False)
        config = shape.config(layers, context)
        weights = weights_of(bench, ops, shape, context)
        limits = StepLimits(rows=1, segments=1, logit_rows=1)
        with DecodeSession(config, weights, ops, slots=1, context=context, kv_dtype="f16", limits=limits) as session:
            bench.fill_cache(session.kv)
            bench.start()
            session.run(StepPlan.pack([Segment(0, context - 1, [7], [0])]))
            parts = launches_by_layer(bench.device.traffic.report(), layers)
    counts = [1, *(kind.count for kind in shape.layers), 1]
    launches = [launch for part, n in zip(parts, counts, strict=True) for _ in range(n) for launch in part]
    of_weights = file_bytes(shape.head, shape.v, shape.d) + file_bytes(shape.embedding, 1, shape.d) + 4 * shape.d
    for kind in shape.layers:
        of_layer = sum(file_bytes(t, n, k) for _, t, n, k in shape.layer_matrices(kind)) + 8 * shape.d
        of_weights += kind.count * (of_layer + (4 * (shape.h + 2 * shape.kh) * shape.hd if shape.biased else 0))
    of_kv = 4 * shape.kh * shape.hd * context * shape.layer_count
    return summed("token", f"{shape.name}, context {context}", launches, of_weights + of_kv, of_weights)


# ---- the command ---------------------------------------------------------------------------------------------------------


def broken_rules(row: Row, context: int) -> list[str]:
    most = next(limit for length, limit in MOST_DRAM if context <= length)
    broken = []
    if row.dram_ratio > most:
        broken.append(f"{row.shape}: DRAM {row.dram_ratio:.3f} of the floor, at most {most}")
    # at long contexts the keys and values are most of what is read
    if context <= MOST_DRAM[0][0] and row.l2_ratio > MOST_L2:
        broken.append(f"{row.shape}: L2 to multiprocessors {row.l2_ratio:.3f} of the weights, at most {MOST_L2}")
    if row.conflict_share > MOST_CONFLICTS:
        where = ", ".join(row.places)
        broken.append(f"{row.shape}: {row.conflict_share:.1%} of shared memory's passes are bank conflicts, at {where}")
    return broken


def kernel_rows(small: bool) -> Iterator[Row]:
    types = (TensorType.Q8_0, TensorType.Q4_1, TensorType.Q4_K) if small else tuple(FORMATS)
    shapes = ((256, 512),) if small else ((576, 1536), (2048, 2048), (512, 11008))
    batches = (1, 4) if small else (1, 4, 8, 64)
    heads = ((4, 2, 64),) if small else ((9, 3, 64), (16, 2, 128), (32, 32, 128), (4, 1, 256))
    for kind, (n, k), batch in itertools.product(types, shapes, batches):
        yield projection_row(kind, n, k, batch)
    for (h, kh, hd), length in itertools.product(heads, (100,) if small else (512, 4096)):
        yield attention_row(h, kh, hd, length)
    yield from small_rows(*((256, 4096) if small else (2048, 151936)))


def print_row(row: Row) -> None:
    where = f"  {', '.join(row.places)}" if row.places else ""
    click.echo(
        f"{row.what:<26} {row.shape:<38} {row.floor:>14,} {row.dram_ratio:>7.3f} {row.l2_ratio:>7.3f} "
        f"{row.conflict_share:>9.2%}{where}"
    )


@click.command()
@click.option(
    "--model", "models", multiple=True, type=click.Choice(list(SHAPES)), help="A token of this model; repeatable."
)
@click.option("--context", "contexts", multiple=True, type=click.IntRange(1, 1 << 17), help="Default: 512 and 4096.")
@click.option("--small", is_flag=True, help="Small shapes only.")
@click.option("--kernels/--no-kernels", default=True, help="Each kernel alone.")
@click.option(
    "--check", is_flag=True, help="Exit with 1 where a token moves more than it may or meets a bank conflict."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    models: tuple[str, ...], contexts: tuple[int, ...], small: bool, kernels: bool, check: bool, as_json: bool
) -> None:
    """Counted DRAM and L2 traffic of the kernels and of decode tokens, over the least that they need."""
    chosen = models or (
        ("tiny-q4_1", "tiny-q4_k_m") if small else ("smollm2-135m-q4_1", "qwen2.5-3b-q8_0", "qwen2.5-3b-q4_k_m")
    )
    lengths = contexts or ((128,) if small else (512, 4096))
    if not as_json:
        click.echo(f"{'kernel':<26} {'shape':<38} {'floor bytes':>14} {'DRAM':>7} {'L2->SM':>7} {'conflicts':>9}")
    rows, broken = [], []

    def take(row: Row) -> None:
        rows.append(row)
        if not as_json:
            print_row(row)

    started = time.perf_counter()
    if kernels:
        for row in kernel_rows(small):
            take(row)
    for name in chosen:
        for context in lengths:
            row = token_row(SHAPES[name], context)
            take(row)
            broken += broken_rules(row, context)
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows], "broken": broken}))
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if check and broken:
        for line in broken:
            print(f"error: {line}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
