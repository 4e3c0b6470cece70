"""llama.cpp as a benchmark worker, through llama-cpp-python's binding of the C API: no high-level Python in the timed loop.

Settings: CPU only, n_threads = n_threads_batch = threads, n_batch = n_ubatch = 512, flash attention and weight repacking at
their defaults (automatic), memory-mapped file, F16 KV in one buffer per sequence (the default; `kv_unified` was 12 % slower
with 8 sequences). Several sequences are decoded as one llama_batch a step.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import llama_cpp as lc
import numpy as np
from worker_protocol import serve

BATCH = 512


@lc.llama_log_callback
def _silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """llama.cpp's log would drown the table."""


class LlamaCpp:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        """`context` positions for each of up to `sequences` sequences."""
        lc.llama_log_set(_silent, ctypes.c_void_p())
        lc.llama_backend_init()
        started = time.perf_counter()
        model_params = lc.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lc.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = lc.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot make a context of {sequences} x {context} tokens")
        self.load_s = time.perf_counter() - started
        self.memory = lc.llama_get_memory(self.context)
        self.vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(BATCH, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One llama_decode of (token, position, sequence, wants logits) rows."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants
        if lc.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")

    def _argmax(self, row: int) -> int:
        pointer = lc.llama_get_logits_ith(self.context, row)  # waits for the computation
        return int(np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).argmax())

    def measure(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Prefill of every prompt, then `steps` greedy steps of one row per sequence; ends of text are ignored."""
        lc.llama_memory_clear(self.memory, True)
        started = time.perf_counter()
        last = []
        for sequence, ids in enumerate(prompts):
            for at in range(0, len(ids), BATCH):
                chunk = ids[at : at + BATCH]
                self._decode([(t, at + i, sequence, at + i == len(ids) - 1) for i, t in enumerate(chunk)])
            last.append(self._argmax(len(chunk) - 1))
        prefilled = time.perf_counter()
        output = [last[0]]
        for step in range(steps):
            self._decode([(last[s], len(ids) + step, s, True) for s, ids in enumerate(prompts)])
            last = [self._argmax(s) for s in range(len(prompts))]
            output.append(last[0])
        ended = time.perf_counter()
        return {
            "prefill_tok_s": sum(map(len, prompts)) / (prefilled - started),
            "decode_tok_s": len(prompts) * steps / (ended - prefilled),
            "total_s": ended - started,
            "output": output,
        }


def main() -> None:
    path, threads, context, sequences = sys.argv[1:]
    engine = LlamaCpp(path, int(threads), int(context), int(sequences))
    version = f"llama-cpp-python {lc.__version__}"
    serve(
        {"load_s": engine.load_s, "version": version, "description": lc.llama_print_system_info().decode()},
        engine.measure,
    )


if __name__ == "__main__":
    main()
