"""A long prompt beside running decodes: how long does a reader wait for a token while somebody else's prompt is computed?"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from serving_client import Clients, ServerFailed
from serving_load import Call, TakePrompts
from serving_stats import Record, gaps_within, percentile

SETTLE_PIECES = 16  # that each decode has had before anything is measured
ALONE_SECONDS = 2.0
FEW = 4  # tokens where only the first one counts: it might have no text


@dataclass(frozen=True)
class Interference:
    """Times in seconds; one value a round, or gaps of all rounds together.

    `last_chunk` is the time of one chunk of prefill, alone, at the end of the long prompt, where attention has most to read;
    `mean_chunk` the long prompt's time to its first token, alone, over its chunks.
    """

    decodes: int
    prompt: int
    chunk: int
    last_chunk: list[float]
    mean_chunk: list[float]
    ttft: list[float]
    gaps_alone: list[float]
    gaps_beside: list[float]

    @property
    def p99_alone(self) -> float:
        return percentile(self.gaps_alone, 99) or 0.0

    @property
    def p99_beside(self) -> float:
        return percentile(self.gaps_beside, 99) or 0.0

    @property
    def chunk_time(self) -> float:
        return statistics.median(self.last_chunk)

    @property
    def ratio(self) -> float:
        """p99 gap beside the prefill, over one chunk's time: at most 1 is wanted."""
        return self.p99_beside / self.chunk_time

    def as_dict(self) -> dict[str, Any]:
        shown = ("p99_alone", "p99_beside", "chunk_time", "ratio")
        return asdict(self) | {name: getattr(self, name) for name in shown}


async def measure(
    clients: Clients, take: TakePrompts, *, decodes: int, prompt: int, chunk: int, rounds: int
) -> Interference:
    """`rounds` times: a chunk alone, the long prompt alone, the decodes alone, then both together.

    Raises:
        ServerFailed: a request failed, or the server's prefix cache did not do what the measurement of a chunk needs.
    """
    result = Interference(decodes, prompt, chunk, [], [], [], [], [])
    for _ in range(rounds):
        result.last_chunk.append(await _last_chunk(clients, take, prompt, chunk))
        alone = _checked(await clients.stream(Call(tuple(take(1, prompt)[0]), FEW)))
        result.mean_chunk.append(alone.ttft / -(-prompt // chunk))
        await _together(clients, take, result)
    return result


async def _last_chunk(clients: Clients, take: TakePrompts, prompt: int, chunk: int) -> float:
    """The prompt without its last chunk, then whole: the beginning is still in its slot, one chunk is left to compute."""
    ids = tuple(take(1, prompt)[0])
    if prompt > chunk:
        _checked(await clients.stream(Call(ids[:-chunk], FEW)))
    record = _checked(await clients.stream(Call(ids, FEW)))
    surplus = record.cached_tokens - (prompt - chunk)  # where the model has guessed how the prompt goes on
    if not 0 <= surplus < FEW:
        raise ServerFailed(
            f"{record.cached_tokens} instead of {prompt - chunk} tokens were reused: no other user, please, while this runs"
        )
    return record.ttft


async def _together(clients: Clients, take: TakePrompts, result: Interference) -> None:
    records = [Record(0.0) for _ in range(result.decodes)]
    calls = [Call(tuple(ids), result.prompt) for ids in take(result.decodes, 32)]  # long enough; cut below
    tasks = [
        asyncio.create_task(clients.stream(call, record=record)) for call, record in zip(calls, records, strict=True)
    ]
    try:
        while any(len(record.arrivals) < SETTLE_PIECES for record in records):
            _still_running(tasks, records)
            await asyncio.sleep(0.01)
        settled = time.perf_counter()
        await asyncio.sleep(ALONE_SECONDS)
        result.gaps_alone.extend(gaps_within(records, settled, time.perf_counter()))
        sent = time.perf_counter()
        long = _checked(await clients.stream(Call(tuple(take(1, result.prompt)[0]), FEW)))
        _still_running(tasks, records)
        await asyncio.sleep(0.05)  # the pieces of the last shared step arrive
        result.ttft.append(long.ttft)
        result.gaps_beside.extend(gaps_within(records, sent, sent + long.ttft))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _still_running(tasks: list[asyncio.Task[Record]], records: list[Record]) -> None:
    if any(task.done() for task in tasks):
        errors = [record.error for record in records if record.error]
        raise ServerFailed(f"a decode ended too early: {errors or 'it reached its length'}")


def _checked(record: Record) -> Record:
    if not record.complete:
        raise ServerFailed(f"a request failed with status {record.status}: {record.error}")
    return record
