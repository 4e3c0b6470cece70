"""What a model will take on the device, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from m40llm.config import ModelConfig
from m40llm.device.errors import DeviceError
from m40llm.gguf import GGUFFile
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda import reduce
from m40llm.ops.cuda.pack import packed_bytes
from m40llm.plan import StepLimits, plan_offsets

_MIB = 1 << 20


class OverBudget(DeviceError):
    """The plan does not fit into the device's free memory."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device: packed weights, the KV cache, the buffers of the largest step, FP32 copies of weights."""

    weights: int
    kv: int
    workspace: int
    materialised: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace + self.materialised

    def check(self, free: int) -> None:
        """Raises OverBudget, with the numbers and the flags that change them, if `free` bytes are too few."""
        if self.total > free:
            copies = f"in FP32 {self.materialised / _MIB:.0f}, " if self.materialised else ""
            raise OverBudget(
                f"the model needs {self.total / _MIB:.0f} MiB (weights {self.weights / _MIB:.0f}, {copies}KV cache "
                f"{self.kv / _MIB:.0f}, workspace {self.workspace / _MIB:.0f}), {free / _MIB:.0f} MiB are free on the "
                "device; shorten the context (--ctx), run fewer sequences, or use --device cpu"
            )


def memory_plan(file: GGUFFile, config: ModelConfig, layout: KVLayout, limits: StepLimits) -> MemoryPlan:
    """The plan of a model whose tensors have been checked (`weights.check_tensors`). Small scratch is left out."""
    weights = 0
    for info in file.tensors.values():
        weights += 4 * info.columns if len(info.shape) == 1 else packed_bytes(info.type, info.rows, info.columns)
    widths = 2 * config.d_model + 2 * config.q_width + 2 * config.kv_width + config.d_ff
    step = 4 * (limits.rows * widths + limits.logit_rows * (config.vocab_size + config.d_model))
    most = reduce.most_candidates(config.vocab_size)
    step += limits.logit_rows * 8 * (reduce.topk_partials(config.vocab_size, most) + most)
    rope = 4 * layout.context * config.rope.dim
    return MemoryPlan(weights + rope, layout.nbytes, step + 4 * plan_offsets(limits)["total"])
