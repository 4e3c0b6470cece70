"""m40llm's CPU path as a benchmark worker: requests go through `Engine.submit`, as a server's do."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

from worker_protocol import serve

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine import Engine
from m40llm.generation import Generation, TokenEvent


class Recorder:
    """When each token of one request was committed, seen from the engine's thread."""

    def __init__(self) -> None:
        self.generation: Generation | None = None  # known only after submit
        self.times: list[float] = []

    def __call__(self) -> None:
        now = time.perf_counter()
        while self.generation is not None and (event := self.generation.poll()) is not None:
            if isinstance(event, TokenEvent) and event.token_ids:
                self.times.append(now)


class M40llm:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        """`context` positions for each of up to `sequences` sequences."""
        self.compiled: list[str] = []
        options = RuntimeOptions(device="cpu", threads=threads, ctx=context, slots=sequences)
        self.engine = Engine.load(path, options, on_compile=self.compiled.append, warm_up=True)
        self.load_s = self.engine.model.load_s  # without the warm-up

    def measure(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """All prompts at once, `steps` greedy tokens after the first of each; ends of text are ignored.

        With several prompts, decoding is counted from the moment when all of them decode to the moment when the first one ends:
        before that, prefill shares the steps.
        """
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        recorders = [Recorder() for _ in prompts]
        compiled = len(self.compiled)
        started = time.perf_counter()
        for ids, recorder in zip(prompts, recorders, strict=True):
            recorder.generation = self.engine.submit(ids, params, on_event=recorder)
        results = [recorder.generation.result for recorder in recorders if recorder.generation]
        if any(result.cached_tokens for result in results):
            raise SystemExit(
                "a prompt was partly reused from an earlier request: the measurement would not be one of prefill"
            )
        all_decode = max(recorder.times[0] for recorder in recorders)
        first_ends = min(recorder.times[-1] for recorder in recorders)
        decoded = sum(all_decode < t <= first_ends for recorder in recorders for t in recorder.times)
        return {
            "prefill_tok_s": sum(map(len, prompts)) / (all_decode - started),
            "decode_tok_s": decoded / (first_ends - all_decode),
            "total_s": max(recorder.times[-1] for recorder in recorders) - started,
            "output": list(results[0].token_ids),
            "compiled": len(self.compiled) - compiled,
        }


def main() -> None:
    path, threads, context, sequences = sys.argv[1:]
    worker = M40llm(path, int(threads), int(context), int(sequences))
    with worker.engine as engine:
        serve(
            {
                "load_s": worker.load_s,
                "version": f"m40llm {version('m40llm')}",
                "description": engine.model.description,
                "compiled": len(worker.compiled),
            },
            worker.measure,
        )


if __name__ == "__main__":
    main()
