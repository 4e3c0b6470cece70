"""StepPlan packing and the plan's memory map."""

import numpy as np
import pytest

from m40llm.plan import PLAN_FIELDS, Segment, StepLimits, StepPlan, StepShape, plan_offsets


def test_pack_lays_segments_end_to_end() -> None:
    plan = StepPlan.pack([Segment(3, 10, [7], (0,)), Segment(0, 0, [1, 2, 3]), Segment(1, 4, [8, 9], (0, 1))])
    np.testing.assert_array_equal(plan.token_ids, [7, 1, 2, 3, 8, 9])
    np.testing.assert_array_equal(plan.pos, [10, 0, 1, 2, 4, 5])
    np.testing.assert_array_equal(plan.row_slot, [3, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(plan.cu_seqlens_q, [0, 1, 4, 6])
    np.testing.assert_array_equal(plan.kv_lens, [11, 3, 6])
    np.testing.assert_array_equal(plan.slots, [3, 0, 1])
    np.testing.assert_array_equal(plan.logit_rows, [0, 4, 5])
    assert plan.shape == StepShape(rows=6, segments=3, logit_rows=3, longest=4)
    assert all(getattr(plan, name).dtype == np.int32 for name in PLAN_FIELDS)


@pytest.mark.parametrize(
    "segments", [[], [Segment(0, 0, [])], [Segment(1, 0, [1]), Segment(1, 5, [2])]], ids=["none", "empty", "slot twice"]
)
def test_pack_refuses_what_no_kernel_can_run(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match="segment"):
        StepPlan.pack(segments)


def test_offsets_are_aligned_and_do_not_overlap() -> None:
    limits = StepLimits(rows=33, segments=5, logit_rows=17)
    offsets = plan_offsets(limits)
    sizes = dict(zip(PLAN_FIELDS, (33, 33, 33, 6, 5, 5, 17), strict=True))
    end = 0
    for name in PLAN_FIELDS:
        assert offsets[name] % 16 == 0
        assert offsets[name] >= end
        end = offsets[name] + sizes[name]
    assert offsets["total"] >= end
