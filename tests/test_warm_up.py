"""Model.warm_up: whatever a later step needs has been compiled and loaded by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from m40llm.config import RuntimeOptions
from m40llm.gguf import TensorType
from m40llm.model import Model
from m40llm.ops.cpu.program import NativeFunction
from m40llm.plan import Segment, StepPlan
from tests.tiny_gguf import build_tiny_gguf


def test_a_warm_up_ends_where_it_is_told_to(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "tiny.gguf")
    asked = []

    def before_step() -> None:
        asked.append(True)
        if len(asked) == 2:
            raise KeyboardInterrupt

    with Model.open(path, RuntimeOptions(device="cpu", threads=1, ctx=64)) as model:
        with pytest.raises(KeyboardInterrupt):
            model.warm_up(before_step)
        assert len(asked) == 2
        model.warm_up()  # and may be had later


@pytest.mark.parametrize("slots", [1, 3, 9])
def test_no_step_needs_a_kernel_that_the_warm_up_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    needed: set[str] = set()
    address = NativeFunction.address

    def noted(self: NativeFunction, on_compile: Callable[[str], None] | None = None) -> int:
        needed.add(self.name)
        return address(self, on_compile)

    monkeypatch.setattr(NativeFunction, "address", noted)
    types = {"output.weight": TensorType.Q8_0, "blk.*": TensorType.Q4_1}
    path = build_tiny_gguf(tmp_path / "tiny.gguf", types=types)
    options = RuntimeOptions(device="cpu", threads=1, ctx=64, slots=slots, token_budget=32)
    with Model.open(path, options) as model:
        model.warm_up()
        warm = set(needed)
        assert any(name.startswith("q8_0 x 1 ") for name in warm)
        for rows in range(1, 33):  # a prompt
            model.session.run(StepPlan.pack([Segment(0, 0, [5] * rows, (rows - 1,))]))
        for count in range(1, slots + 1):  # decodes together, alone and beside a prompt
            decodes = [Segment(slot, 0, [5], (0,)) for slot in range(count)]
            model.session.run(StepPlan.pack(decodes))
            model.session.run(StepPlan.pack([*decodes[1:], Segment(0, 0, [5] * 16)]))
    assert needed == warm
