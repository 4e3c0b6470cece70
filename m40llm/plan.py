"""StepPlan: what one step computes, decided once on the host and read by every kernel.

A step packs rows of several sequences without padding. Row t belongs to one segment (a run of consecutive positions of
one sequence); segment s covers rows `cu_seqlens_q[s]:cu_seqlens_q[s+1]`. Decode is a segment of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class StepShape(NamedTuple):
    """The sizes that fix which kernels run with which grids; equal shapes may share one recorded step."""

    rows: int  # T
    segments: int  # S
    logit_rows: int  # R
    longest: int  # rows of the longest segment, rounded up to a power of two


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start .. start+len(token_ids)` of the sequence in KV slot `slot`; `want`: the local rows that need logits."""

    slot: int
    start: int
    token_ids: Sequence[int]
    want: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed step. All arrays are int32."""

    token_ids: I32  # (T,)
    pos: I32  # (T,)   position of each row in its sequence
    row_slot: I32  # (T,)   KV slot of each row
    cu_seqlens_q: I32  # (S+1,)
    kv_lens: I32  # (S,)   positions attended to by the segment's last row
    slots: I32  # (S,)
    logit_rows: I32  # (R,)   rows whose logits are computed

    @property
    def shape(self) -> StepShape:
        longest = int(np.diff(self.cu_seqlens_q).max())
        return StepShape(len(self.token_ids), len(self.slots), len(self.logit_rows), 1 << (longest - 1).bit_length())

    @classmethod
    def pack(cls, segments: Sequence[Segment]) -> StepPlan:
        """Packs segments in the given order.

        Raises:
            ValueError: no segments, an empty one, or a slot named twice.
        """
        if not segments or any(not len(s.token_ids) for s in segments):
            raise ValueError("a step needs at least one segment, and each segment at least one token")
        if len({s.slot for s in segments}) != len(segments):
            raise ValueError("a KV slot may appear in only one segment of a step")
        ids: list[int] = []
        pos: list[int] = []
        row_slot: list[int] = []
        cu: list[int] = [0]
        want: list[int] = []
        for s in segments:
            n = len(s.token_ids)
            want.extend(cu[-1] + w for w in s.want)
            ids.extend(s.token_ids)
            pos.extend(range(s.start, s.start + n))
            row_slot.extend([s.slot] * n)
            cu.append(cu[-1] + n)
        return cls(
            token_ids=np.array(ids, np.int32),
            pos=np.array(pos, np.int32),
            row_slot=np.array(row_slot, np.int32),
            cu_seqlens_q=np.array(cu, np.int32),
            kv_lens=np.array([s.start + len(s.token_ids) for s in segments], np.int32),
            slots=np.array([s.slot for s in segments], np.int32),
            logit_rows=np.array(want, np.int32),
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a session must be able to run: fixes every buffer's size before the first step."""

    rows: int  # T
    segments: int  # S, at most one per slot
    logit_rows: int  # R


PLAN_FIELDS = ("token_ids", "pos", "row_slot", "cu_seqlens_q", "kv_lens", "slots", "logit_rows")


def plan_offsets(limits: StepLimits) -> dict[str, int]:
    """Offset (in int32 elements) of each plan array inside one packed buffer, and `"total"`.

    Every array starts on a 64-byte boundary, so the whole plan travels to the device in one copy and each array keeps
    its address from step to step (recorded steps and CUDA graphs depend on that).
    """
    sizes = (
        limits.rows,
        limits.rows,
        limits.rows,
        limits.segments + 1,
        limits.segments,
        limits.segments,
        limits.logit_rows,
    )
    offsets, at = {}, 0
    for name, size in zip(PLAN_FIELDS, sizes, strict=True):
        offsets[name] = at
        at += -(-size // 16) * 16
    return {**offsets, "total": at}
