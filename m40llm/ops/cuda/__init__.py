"""The CUDA backend: hand-written kernels on a `Device`, which is a card or the emulator."""

from m40llm.ops.cuda.backend import ProjectionPlan, plan_projections
from m40llm.ops.cuda.memory import MemoryPlan, OverBudget, memory_plan
from m40llm.ops.cuda.ops import CudaOps, check_model

__all__ = ["CudaOps", "MemoryPlan", "OverBudget", "ProjectionPlan", "check_model", "memory_plan", "plan_projections"]
