"""The kernels as they are keep to the targets for sm_52: issue within the memory time, predicted speed; and the check can fail."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from m40llm.device.roofline import KernelCost, load_costs
from tests.bench_scripts import of_bench

COLUMNS = (2048, 4096, 11008)


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    return of_bench("sm52_targets")


@pytest.fixture(scope="module")
def prediction(targets: ModuleType) -> object:
    shape = of_bench("shapes").SHAPES[targets.TARGET_MODEL]
    return targets.predicted(shape, "m40-24g", 512, 1, load_costs())


def test_every_target_is_met(targets: ModuleType, prediction: object) -> None:
    rows = list(targets.projection_rows(load_costs(), COLUMNS))
    held = {(row.kind.name, row.rows) for row in rows if row.rows in targets.MOST_ISSUE}
    assert held >= {(name, count) for name in targets.TARGET_TYPES for count in (1, 4)}
    assert any(":" in row.name for row in rows)  # also where one kernel handles two types
    assert targets.missed_targets(rows, prediction) == []


@pytest.mark.parametrize("kernel", ["project_q4_k_r4+staged", "project_q4_k_q6_k_r4:q4_k+staged"])
def test_a_few_instructions_more_are_named(targets: ModuleType, prediction: object, kernel: str) -> None:
    def slower(cost: KernelCost) -> KernelCost:
        return replace(cost, once={**cost.once, "full": cost.once["full"] + 20})

    costs = {name: slower(cost) if name == kernel else cost for name, cost in load_costs().items()}
    (line,) = targets.missed_targets(list(targets.projection_rows(costs, COLUMNS)), prediction)
    assert line.startswith(f"{kernel}, K = 2048: issues in 101% of the memory time")
