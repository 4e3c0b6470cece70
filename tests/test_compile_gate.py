"""Every kernel compiles for every architecture that we name; on sm_52 none spills, and none outgrows its register budget.

The budget is `data/sm52_budget.json`: module → kernel → registers as ptxas of NVRTC 12.9 allots them. More registers are a
decision: run `python -m tests.test_compile_gate` and commit the table together with the reason.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from m40llm.cli.compile import command
from m40llm.device.compile_all import BuiltKernel, compile_all
from m40llm.device.errors import DeviceUnavailable
from m40llm.device.sources import kernel_modules

BUDGET = Path(__file__).parent / "data" / "sm52_budget.json"
# What ptxas may do differently from one compilation unit to the next without anybody's doing
SLACK = 2


def by_module(kernels: list[BuiltKernel]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = defaultdict(dict)
    for kernel in kernels:
        table[kernel.module][kernel.name] = kernel.registers
    return dict(table)


@pytest.fixture(scope="module")
def sm52() -> list[BuiltKernel]:
    return compile_all(["sm_52"], cuda_major=12)


def test_no_kernel_spills_on_sm52(sm52: list[BuiltKernel]) -> None:
    assert {f"{k.module}/{k.name}": k.spill_bytes for k in sm52 if k.spill_bytes or k.stack_bytes} == {}


def test_registers_stay_within_the_budget(sm52: list[BuiltKernel]) -> None:
    budget = json.loads(BUDGET.read_text())
    found = by_module(sm52)
    assert {m: set(kernels) for m, kernels in found.items()} == {m: set(kernels) for m, kernels in budget.items()}
    over = {
        f"{module}/{name}": (registers, budget[module][name])
        for module, kernels in found.items()
        for name, registers in kernels.items()
        if registers > budget[module][name] + SLACK
    }
    assert over == {}


def test_every_block_fits_into_a_multiprocessor(sm52: list[BuiltKernel]) -> None:
    """Launch bounds are declared and read from the source, and a multiprocessor holds at least one such block."""
    assert {k.name for k in sm52 if k.threads > 256 or k.blocks_per_sm < 1} == set()


# No kernel asks for its architecture, so one module of each family tells for all; the whole grid takes minutes.
FAMILIES = [m for m in kernel_modules() if not m.startswith("project_") and not m.endswith("_ldg")] + ["project_q8_0"]
TARGETS = [(12, f"sm_{number}") for number in (61, 70, 75, 80, 86, 89, 90)] + [(13, "sm_75"), (13, "sm_90")]


@pytest.mark.parametrize(("major", "arch"), TARGETS)
def test_every_family_compiles_for_every_card(major: int, arch: str) -> None:
    assert {k.module for k in compile_all([arch], modules=FAMILIES, cuda_major=major)} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize(("major", "arch"), TARGETS)
def test_every_kernel_compiles_for_every_card(major: int, arch: str) -> None:
    assert {k.module for k in compile_all([arch], cuda_major=major)} == set(kernel_modules())


def test_nvrtc_13_has_no_maxwell() -> None:
    with pytest.raises(DeviceUnavailable, match="cannot compile for sm_52"):
        compile_all(["sm_52"], cuda_major=13)


def test_the_command_prints_what_the_compiler_said(sm52: list[BuiltKernel]) -> None:
    result = CliRunner().invoke(command, ["--arch", "sm_52", "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)["kernels"]
    assert len(printed) == len(sm52)
    keys = {"name", "module", "arch", "registers", "spill_bytes", "shared_bytes", "occupancy", "blocks_per_sm"}
    assert all(keys <= set(kernel) for kernel in printed)
    table = CliRunner().invoke(command, ["--arch", "sm_52"])
    assert table.exit_code == 0
    assert len(table.stdout.splitlines()) == len(sm52) + 1
    assert "attention_decode_hd128_g8" in table.stdout


if __name__ == "__main__":
    BUDGET.write_text(json.dumps(by_module(compile_all(["sm_52"], cuda_major=12)), indent=1) + "\n")
