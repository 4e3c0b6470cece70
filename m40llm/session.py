"""DecodeSession: owns the buffers of one model on one device, runs one StepPlan at a time, reads back the sampled ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from m40llm.config import KVDtype, ModelConfig
from m40llm.forward import forward
from m40llm.kv import KVLayout
from m40llm.ops.protocol import Ops, Step
from m40llm.plan import StepLimits, StepPlan, StepShape
from m40llm.weights import ModelWeights

# Recorded steps are small, but shapes of prefill chunks are many; decode shapes (few rows) stay.
_MAX_RECORDED_STEPS = 64

Candidates = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids, logits


class StepResult:
    """A step's outputs on the host, one row per entry of the plan's `logit_rows`.

    `ids` (R,) int32 are the greedy tokens. `logits` (R, V) float32 are valid until the next step and fetched when first
    asked for: a device then copies megabytes, which greedy requests have no use for, nor do those that are content with
    `candidates`.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        read_logits: Callable[[], NDArray[np.float32]],
        read_candidates: Callable[[int], Candidates | None],
    ):
        self.ids = ids
        self._read_logits = read_logits
        self._read_candidates = read_candidates
        self._candidates: Candidates | None = None
        self._logits: NDArray[np.float32] | None = None

    @property
    def logits(self) -> NDArray[np.float32]:
        if self._logits is None:
            self._logits = self._read_logits()
        return self._logits

    def candidates(self, row: int, count: int) -> Candidates | None:
        """Ids and logits, both (count,), of a row's largest logits: descending, equals by ascending id; until the next step.

        None where `logits` is as near, for more than the device selects, and for a row whose largest logit is not finite:
        the whole row tells why.
        """
        if self._candidates is None or self._candidates[0].shape[1] < count:
            self._candidates = self._read_candidates(count)
        if self._candidates is None:
            return None
        ids, logits = self._candidates
        return (ids[row, :count], logits[row, :count]) if np.isfinite(logits[row, 0]) else None


class DecodeSession:
    """A model with its KV cache and workspace. Not thread-safe: one thread owns it.

    Args:
        slots: sequences that can hold KV at once.
        context: positions per slot.
        limits: the largest step; buffers are allocated for it here and never again.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        slots: int,
        context: int,
        kv_dtype: KVDtype,
        limits: StepLimits,
    ) -> None:
        self.config = config
        self.limits = limits
        self.kv_layout = KVLayout.for_model(config, slots, context, kv_dtype)
        self._weights = weights
        self._ops = ops
        self._steps: OrderedDict[StepShape, Step] = OrderedDict()
        with ExitStack() as on_failure:
            on_failure.callback(ops.close)
            self.kv = ops.new_kv(self.kv_layout)
            self._ws = ops.new_workspace(config, limits)
            on_failure.pop_all()

    def run(self, plan: StepPlan) -> StepResult:
        """Computes one step.

        Raises:
            ValueError: the plan is larger than the session's limits or reaches outside the KV cache.
        """
        shape = plan.shape
        self._check(plan, shape)
        self._ops.upload(self._ws, plan)
        step = self._steps.get(shape)
        if step is None:
            step = self._record(shape)
        else:
            self._steps.move_to_end(shape)
        step.run()
        rows = shape.logit_rows
        ids = self._ops.read_ids(self._ws, rows)
        return StepResult(
            ids,
            partial(self._ops.read_logits, self._ws, rows),
            partial(self._ops.read_candidates, self._ws, rows),
        )

    def read_kv(self, slot: int, start: int, stop: int) -> NDArray:
        """K and V of positions `start .. stop` of a slot: (2, L, n, KH, HD) in the KV storage type, K first.

        Raises:
            IndexError: outside the KV cache; as in `write_kv` and `copy_kv`.
        """
        self._check_positions(slot, start, stop)
        return self._ops.read_kv(self.kv, slot, start, stop)

    def write_kv(self, slot: int, start: int, data: NDArray) -> None:
        """Stores what `read_kv` returned, or positions of it, from position `start` of a slot on."""
        layout = self.kv_layout
        self._check_positions(slot, start, start + data.shape[2])
        expected = (2, layout.n_layers, data.shape[2], layout.n_kv_heads, layout.head_dim)
        if data.shape != expected or data.dtype != layout.storage:
            raise ValueError(f"keys and values are {data.dtype} {data.shape}; expected {layout.storage} {expected}")
        self._ops.write_kv(self.kv, slot, start, data)

    def copy_kv(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies positions `start .. stop` from one slot to another."""
        self._check_positions(source, start, stop)
        self._check_positions(target, start, stop)
        self._ops.copy_kv(self.kv, source, target, start, stop)

    def _check_positions(self, slot: int, start: int, stop: int) -> None:
        layout = self.kv_layout
        if not (0 <= slot < layout.n_slots and 0 <= start < stop <= layout.context):
            raise IndexError(
                f"positions {start}..{stop} of slot {slot} are outside {layout.n_slots} slots of {layout.context} tokens"
            )

    def _record(self, shape: StepShape) -> Step:
        def body() -> None:
            forward(self.config, self._weights, self._ws, self.kv, shape, self._ops)

        step = self._ops.record(shape, body)
        self._steps[shape] = step
        if len(self._steps) > _MAX_RECORDED_STEPS:
            self._steps.popitem(last=False)
        return step

    def _check(self, plan: StepPlan, shape: StepShape) -> None:
        limits = self.limits
        if shape.rows > limits.rows or shape.segments > limits.segments or shape.logit_rows > limits.logit_rows:
            raise ValueError(f"step {shape} is over the session's limits {limits}")
        if int(plan.kv_lens.max()) > self.kv_layout.context or int(plan.pos.min()) < 0:
            raise ValueError(f"a position is outside the context of {self.kv_layout.context} tokens")
        if int(plan.slots.min()) < 0 or int(plan.slots.max()) >= self.kv_layout.n_slots:
            raise ValueError(f"a slot is outside 0..{self.kv_layout.n_slots - 1}")
        if int(plan.token_ids.min()) < 0 or int(plan.token_ids.max()) >= self.config.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.config.vocab_size}")

    def close(self) -> None:
        """Releases the device buffers; may be called twice."""
        self._steps.clear()
        self._ops.close()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
