"""Programs and workers: order, barriers, replay, sleep and wake, argument checks, and the kernel cache."""

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from m40llm.ops.cpu.intrinsics import f16_to_f32, f32, f32_to_f16, record, u16
from m40llm.ops.cpu.program import Program, Workers, aligned_empty, kernel, layout, pointer

ROTATE = layout(x=pointer(np.float32), out=pointer(np.float32), n=np.int64, factor=np.float32)
HALVES = layout(x=pointer(np.float32), out=pointer(np.uint16), back=pointer(np.float32), n=np.int64)


@kernel(ROTATE)
def rotate(args, tid, threads):
    """out[i] = x[i + 1] * factor: each thread reads what another wrote, so a missing barrier shows."""
    a = record(args, ROTATE)
    x = f32(a.x, a.n)
    out = f32(a.out, a.n)
    for i in range(tid * a.n // threads, (tid + 1) * a.n // threads):
        out[i] = x[(i + 1) % a.n] * a.factor


@kernel(HALVES)
def halves(args, tid, threads):
    a = record(args, HALVES)
    x, out, back = f32(a.x, a.n), u16(a.out, a.n), f32(a.back, a.n)
    if tid == 0:
        for i in range(a.n):
            out[i] = f32_to_f16(x[i])
            back[i] = f16_to_f32(out[i])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_barriers_order_the_kernels(threads):
    x, y = np.arange(300, dtype=np.float32), np.zeros(300, np.float32)
    program = Program()
    for _ in range(100):
        program.add(rotate, x=x, out=y, n=300, factor=1.0)
        program.add(rotate, x=y, out=x, n=300, factor=1.0)
    with Workers(threads) as workers:
        for _ in range(5):
            program.run(workers)
    assert np.array_equal(x, np.roll(np.arange(300, dtype=np.float32), -1000))


def test_sleeping_workers_wake():
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    program = Program()
    program.add(rotate, x=x, out=y, n=8, factor=2.0)
    with Workers(2) as workers:
        for i in range(20):
            x[:] = i
            time.sleep(0.003 if i % 2 else 0)
            program.run(workers)
            assert np.array_equal(y, x * 2)


def test_half_precision_is_numpys():
    x = np.array([0, 1, -2.5, 65504, 1e6, 1e-7, 3.1415927, 1 / 3, -6e-8, np.inf], np.float32)
    out, back = np.zeros(len(x), np.uint16), np.zeros(len(x), np.float32)
    program = Program()
    program.add(halves, x=x, out=out, back=back, n=len(x))
    with Workers(1) as workers, np.errstate(over="ignore"):
        program.run(workers)
        assert np.array_equal(out.view(np.float16), x.astype(np.float16))
        assert np.array_equal(back, x.astype(np.float16).astype(np.float32))


def test_arguments_are_checked():
    x = np.zeros(8, np.float32)
    program = Program()
    with pytest.raises(TypeError, match="rotate takes"):
        program.add(rotate, x=x, out=x, n=8)
    with pytest.raises(TypeError, match="rotate, out: float64, not float32"):
        program.add(rotate, x=x, out=np.zeros(8), n=8, factor=1.0)
    assert len(program) == 0


def test_workers_close_once_and_refuse_work():
    with pytest.raises(ValueError, match="threads is 0"):
        Workers(0)
    workers = Workers(2)
    workers.close()
    workers.close()
    program = Program()
    program.add(rotate, x=np.zeros(8, np.float32), out=np.zeros(8, np.float32), n=8, factor=1.0)
    with pytest.raises(RuntimeError, match="closed"):
        program.run(workers)


def test_profile_names_every_kernel():
    x = np.zeros(8, np.float32)
    program = Program()
    for _ in range(3):
        program.add(rotate, x=x, out=x, n=8, factor=1.0)
    with Workers(2) as workers:
        assert program.profile(workers)["rotate"][0] == 3


def test_aligned_empty():
    for shape in (3, (5, 7)):
        array = aligned_empty(shape, np.float32)
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous


def test_second_process_compiles_nothing_and_exits_cleanly(tmp_path):
    script = textwrap.dedent("""
        import numpy as np
        from m40llm.ops.cpu.program import Program, Workers
        from test_cpu_program import halves
        program = Program(on_compile=lambda name: print("compile", name))
        program.add(halves, x=np.zeros(4, np.float32), out=np.zeros(4, np.uint16), back=np.zeros(4, np.float32), n=4)
        workers = Workers(2)  # left open: the exit hook must end its thread
        program.run(workers)
        print("done")
    """)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    runs = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.split() == ["compile", "halves", "done"]
    assert runs[1].stdout.split() == ["done"]
