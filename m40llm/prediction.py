"""What a model would take and do on a card that is not here: memory, and predicted tokens per second.

The forward pass runs on a recording device, so launches, grids and buffers are those of a real step; device/roofline.py turns
them into time, and says how far to believe it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from m40llm.config import ModelConfig
from m40llm.device.recording import RecordedLaunch, RecordingDevice
from m40llm.device.roofline import ERROR, NO_WORK, Card, KernelCost, Time, Work, load_costs, time_on, total
from m40llm.gguf import GGUFFile
from m40llm.ops.cuda.dry_run import DryOps
from m40llm.ops.cuda.launch_cost import SegmentLength, launch_work
from m40llm.ops.cuda.pack import CudaMatrix
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.weights import ModelWeights, load_weights

MakeWeights = Callable[[DryOps], ModelWeights]


@dataclass(frozen=True, slots=True)
class Speed:
    """A predicted rate: tokens per second, its range, and where the time of one step goes."""

    tokens_per_s: float
    low: float
    high: float
    step: Time
    launches: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the card: packed weights (with norms, biases and the RoPE table), KV cache, everything else of a session.

    `materialised`, not part of the total, is what FP32 copies of the layers' matrices would take on top (fast-fits).
    """

    weights: int
    kv: int
    workspace: int
    materialised: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one card: memory, decode at `context` positions with one and with `slots` sequences, prefill of a prompt."""

    card: Card
    context: int
    slots: int
    prompt: int
    memory: Memory
    decode: Speed
    decode_together: Speed
    prefill: Speed

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.card.memory


def weights_of_file(file: GGUFFile, config: ModelConfig, context: int) -> MakeWeights:
    """For `predict`: the file's tensors. ConfigError for a file that is not such a model."""
    return lambda ops: load_weights(file, config, ops, context)


def predict(
    config: ModelConfig,
    make_weights: MakeWeights,
    card: Card,
    *,
    capacity: int,
    context: int,
    slots: int = 1,
    prompt: int = 512,
    token_budget: int = 512,
    costs: Mapping[str, KernelCost] | None = None,
) -> Prediction:
    """Memory and speed of a model on `card`.

    Args:
        capacity: positions of each slot.
        context: positions that a decode step attends to, of each sequence; at most `capacity`.
        prompt: tokens of the prompt whose prefill is timed, in chunks of `token_budget`.
        costs: kernel costs (None: the table of the package).

    Raises:
        DeviceError: the table lacks a kernel.
        ValueError: `context` or `prompt` over `capacity`.
    """
    if not 1 <= context <= capacity or not 1 <= prompt <= capacity:
        raise ValueError(
            f"a context of {context} and a prompt of {prompt} tokens must be within the {capacity} of a slot"
        )
    table = load_costs() if costs is None else costs
    device = RecordingDevice(card.multiprocessors)
    ops = DryOps(device)
    weights = make_weights(ops)
    weight_bytes = _taken(device)
    limits = StepLimits(rows=max(token_budget, slots), segments=slots, logit_rows=slots)
    with DecodeSession(config, weights, ops, slots=slots, context=capacity, kv_dtype="f16", limits=limits) as session:
        kv = session.kv_layout.nbytes
        memory = Memory(weight_bytes, kv, _taken(device) - weight_bytes - kv, _materialised(weights))

        def step(segments: list[Segment]) -> tuple[Work, int]:
            device.launches.clear()
            session.run(StepPlan.pack(segments))
            lengths = [SegmentLength(len(s.token_ids), s.start + len(s.token_ids)) for s in segments]
            return _work(device.launches, table, lengths), len(device.launches)

        def decode(sequences: int) -> Speed:
            work, launches = step([Segment(slot, context - 1, [0], [0]) for slot in range(sequences)])
            return _speed(card, work, sequences, launches)

        alone, together = decode(1), decode(slots)
        whole, launches = NO_WORK, 0
        for start in range(0, prompt, token_budget):
            count = min(token_budget, prompt - start)
            wanted = [count - 1] if start + count == prompt else []
            work, of_chunk = step([Segment(0, start, [0] * count, wanted)])
            whole, launches = whole + work, launches + of_chunk
        prefill = _speed(card, whole, prompt, launches)
    return Prediction(card, context, slots, prompt, memory, alone, together, prefill)


def _taken(device: RecordingDevice) -> int:
    return sum(nbytes for _, nbytes in device.buffers())


def _materialised(weights: ModelWeights) -> int:
    values = (getattr(layer, field.name) for layer in weights.layers for field in fields(layer))
    matrices = (value for value in values if isinstance(value, CudaMatrix))
    return sum(4 * matrix.rows * matrix.columns for matrix in matrices)


def _work(launches: list[RecordedLaunch], costs: Mapping[str, KernelCost], lengths: list[SegmentLength]) -> Work:
    return total(launch_work(launch, costs, lengths) for launch in launches)


def _speed(card: Card, work: Work, tokens: int, launches: int) -> Speed:
    step = time_on(card, work)
    rate = tokens / step.total
    return Speed(rate, rate * (1 + ERROR[0]), rate * (1 + ERROR[1]), step, launches)
