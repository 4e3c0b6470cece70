"""CPU projections alone: a model's matrices, streamed as one step reads them, for several row counts.

    python bench/bench_cpu_project.py [--model smollm2|qwen2.5-coder-1.5b] [--rows 1,8,512] [--isa auto] [--threads 2]

Weights are random blocks of the model's types and shapes. Prints per row count the best and the median time of a step's
projections (quantisation of activations included), the rate of weight bytes read, and multiply-adds per second.
"""

import argparse
import statistics
import time

import numpy as np

from m40llm.gguf import BLOCKS, TensorType
from m40llm.ops.cpu.arena import Arena
from m40llm.ops.cpu.isa import choose_isa
from m40llm.ops.cpu.packing import PackedMatrix, pack_matrix
from m40llm.ops.cpu.program import Program, Workers, aligned_empty
from m40llm.ops.cpu.project import Projection, record_gate_up_swiglu, record_project
from m40llm.ops.cpu.quantise import QuantisedRows, record_quantise

Q4_1, Q8_0, Q4_K, Q6_K = TensorType.Q4_1, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K
# layers, D, q, kv, F, V; types of q/k/o/gate/up, v and down of every layer, and the output
MODELS = {
    "smollm2": (30, 576, 576, 192, 1536, 49152, Q4_1, lambda layer: Q4_1, Q8_0),
    "qwen2.5-coder-1.5b": (28, 1536, 1536, 256, 8960, 151936, Q4_K, lambda layer: Q6_K if layer % 2 else Q4_K, Q6_K),
}


def random_matrix(
    n: int, k: int, kind: TensorType, workers: Workers, rng: np.random.Generator, arena: Arena | None = None
) -> PackedMatrix:
    # bytes below 0x3c: every FP16 among them is finite and less than one
    row = rng.integers(0, 0x3C, (257, BLOCKS[kind].row_bytes(k)), dtype=np.uint8)
    return pack_matrix(lambda start, stop: row[np.arange(start, stop) % len(row)], kind, n, k, workers, None, arena)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--rows", default="1,2,4,8,512")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="time to repeat each row count for")
    options = parser.parse_args()
    layers, d, q_width, kv_width, f, v, most, mixed, last = MODELS[options.model]
    rows = [int(t) for t in options.rows.split(",")]
    isa, rng, arena = choose_isa(options.isa), np.random.default_rng(0), Arena()
    # one thread's own processor time is steady on a machine that others use too
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with Workers(options.threads) as workers:

        def matrix(n: int, k: int, kind: TensorType) -> PackedMatrix:
            return random_matrix(n, k, kind, workers, rng, arena)

        weights = [
            {
                "q": matrix(q_width, d, most),
                "k": matrix(kv_width, d, most),
                "v": matrix(kv_width, d, mixed(i)),
                "o": matrix(d, q_width, most),
                "gate": matrix(f, d, most),
                "up": matrix(f, d, most),
                "down": matrix(d, f, mixed(i)),
            }
            for i in range(layers)
        ]
        output = matrix(v, d, last)
        nbytes = sum(m.nbytes for layer in weights for m in layer.values()) + output.nbytes
        in_layers = sum(m.n * m.k for layer in weights for m in layer.values())
        print(f"{options.model}: {nbytes / 1e6:.0f} MB packed, {isa.name.lower()}, {options.threads} threads")
        scratch = QuantisedRows(max(rows), max(f, d), isa)
        for t in rows:
            x, q, k, vv, act = (aligned_empty((t, w), np.float32) for w in (d, q_width, kv_width, kv_width, f))
            logits = aligned_empty((min(t, 8), v), np.float32)
            x[:], q[:] = rng.standard_normal(x.shape), rng.standard_normal(q.shape)
            program = Program()
            for layer in weights:
                record_quantise(program, x, scratch)
                outs = {"q": q, "k": k, "v": vv}
                record_project(program, [Projection(layer[name], out) for name, out in outs.items()], scratch)
                record_quantise(program, q, scratch)
                record_project(program, [Projection(layer["o"], x)], scratch)
                record_quantise(program, x, scratch)
                record_gate_up_swiglu(program, layer["gate"], layer["up"], scratch, act)
                record_quantise(program, act, scratch)
                record_project(program, [Projection(layer["down"], x)], scratch)
            record_quantise(program, x[: len(logits)], scratch)
            record_project(program, [Projection(output, logits)], scratch)
            program.run(workers)
            times, end = [], time.perf_counter() + options.seconds
            while time.perf_counter() < end or len(times) < 3:
                x[:] = 1.0 + np.arange(d) % 7  # outputs feed inputs: keep them finite
                start = clock()
                program.run(workers)
                times.append(clock() - start)
            work = in_layers * t + output.n * output.k * len(logits)
            best = min(times)
            print(
                f"  rows {t:4d}: best {best * 1e3:8.2f} ms, median {statistics.median(times) * 1e3:8.2f}; "
                f"{nbytes / best / 1e9:5.1f} GB/s of weights, {work / best / 1e9:6.1f} G multiply-adds/s"
            )


if __name__ == "__main__":
    main()
