"""What follows from the kernels' costs on sm_52: time over memory time of each projection, predicted speed, missed targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shapes import ModelShape
from sm52_costs import projection_kernels

from m40llm.device.roofline import CARDS, Cycles, KernelCost
from m40llm.gguf import TensorType
from m40llm.ops.cuda.dry_run import DryOps
from m40llm.ops.cuda.launch_cost import COLUMNS, cost_name
from m40llm.ops.cuda.pack import packed_bytes
from m40llm.prediction import Prediction, predict
from m40llm.weights import LayerWeights, ModelWeights

TARGET_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "F16")
# One row: issue at most half of the memory time from K = 2048 on; four rows: all of it. Kernels that handle one of these types
# beside Q2_K, Q3_K or IQ4_XS are not held to it: Q4_K takes up to 101 % there.
MOST_ISSUE = {1: 0.5, 4: 1.0}
LEAST_SPEED = {"decode": 60.0, "prefill": 500.0}  # of Qwen2.5-3B Q8_0 on an M40, context 512
TARGET_MODEL = "qwen2.5-3b-q8_0"


@dataclass(frozen=True, slots=True)
class ProjectionRow:
    """One projection kernel at one K, per weight of the matrix."""

    name: str
    handled: frozenset[TensorType]  # by this kernel
    kind: TensorType
    rows: int
    columns: int
    instructions: float
    cycles: Cycles  # multiprocessor cycles
    nbytes: float

    def share(self, card: str) -> float:
        """Time of the busiest unit over the time of the bytes at peak bandwidth."""
        chip = CARDS[card]
        return self.cycles.busiest / (chip.multiprocessors * chip.clock_hz) / (self.nbytes / chip.bandwidth)

    def issue_share(self, card: str) -> float:
        """The same of the schedulers alone."""
        return self.share(card) * self.cycles.issue / self.cycles.busiest

    @property
    def unit(self) -> str:
        return max(
            ("issue", "arithmetic", "special", "shared", "load"), key=lambda name: float(getattr(self.cycles, name))
        )


def projection_rows(costs: Mapping[str, KernelCost], columns: tuple[int, ...]) -> Iterator[ProjectionRow]:
    for module, (kind, *others) in projection_kernels():
        for rows in (1, 4, 8):
            plain, staged = (cost_name(f"{module}_r{rows}", module, kind, staged) for staged in (False, True))
            name = staged if staged in costs else plain  # as decode steps run it
            for k in columns:
                cycles = costs[name].warp(k / COLUMNS)
                weights = 4 * k  # of one warp: four rows
                yield ProjectionRow(
                    name=name,
                    handled=frozenset((kind, *others)),
                    kind=kind,
                    rows=rows,
                    columns=k,
                    instructions=cycles.issue * 4 * 32 / weights,
                    cycles=cycles * (1 / weights),
                    nbytes=packed_bytes(kind, 4, k) / weights,
                )


def model_weights(shape: ModelShape, context: int) -> tuple[int, Callable[[DryOps], ModelWeights]]:
    """(layers, weights for `predict`) of a shape: every layer, of its kind."""

    def make(ops: DryOps) -> ModelWeights:
        kinds = [kind for kind in shape.layers for _ in range(kind.count)]
        layers = []
        for i, kind in enumerate(kinds):
            m = {name: ops.matrix(f"blk.{i}.{name}", t, n, k) for name, t, n, k in shape.layer_matrices(kind)}
            biases = {
                f"attn_{part}_bias": ops.vector(f"blk.{i}.{part}", m[f"attn_{part}"].rows) if shape.biased else None
                for part in "qkv"
            }
            norms = {name: ops.vector(f"blk.{i}.{name}", shape.d) for name in ("attn_norm", "ffn_norm")}
            layers.append(LayerWeights(**m, **biases, **norms))
        table = ops.matrix("token_embd", shape.embedding, shape.v, shape.d)
        head = table if shape.tied else ops.matrix("output", shape.head, shape.v, shape.d)
        rope = ops.load_rope(shape.config(1, context), context)
        return ModelWeights(table, tuple(layers), ops.vector("output_norm", shape.d), head, rope)

    return shape.layer_count, make


def predicted(shape: ModelShape, card: str, context: int, slots: int, costs: Mapping[str, KernelCost]) -> Prediction:
    layers, make = model_weights(shape, context)
    config = shape.config(layers, context)
    return predict(config, make, CARDS[card], capacity=context, context=context, slots=slots, costs=costs)


def missed_targets(rows: list[ProjectionRow], target: Prediction) -> list[str]:
    missed = [
        f"{row.name}, K = {row.columns}: issues in {row.issue_share('m40-24g'):.0%} of the memory time on an M40, at most "
        f"{MOST_ISSUE[row.rows]:.0%}"
        for row in rows
        if {kind.name for kind in row.handled} <= set(TARGET_TYPES)
        and row.rows in MOST_ISSUE
        and row.issue_share("m40-24g") > MOST_ISSUE[row.rows]
    ]
    for what, least in LEAST_SPEED.items():
        speed = getattr(target, what).tokens_per_s
        if speed < least:
            missed.append(f"{TARGET_MODEL} on an M40: predicted {what} {speed:.1f} tok/s, at least {least:.0f}")
    return missed
