"""A persistent kernel against launches: how long until a small piece of work is done, and how many are done a second.

    python bench/bench_persistent.py [--values 576] [--repeats 2000]

Needs a card. Three ways of the same y = a·x + y on `--values` float32: a launch and a wait each; launches back to back with one
wait; entries in the mailbox of `m40llm/device/persistent.py`. Medians, and the 10th and 90th percentile, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from m40llm.device.choose import choose_device, open_device
from m40llm.device.errors import DeviceUnavailable
from m40llm.device.persistent import PersistentWorker

IN_FLIGHT = 32


def measure(repeats: int, work: Callable[[], None], pieces: int = 1) -> str:
    """Time of `work` per piece: median [10th .. 90th percentile] in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) / pieces * 1e6)
    low, median, high = np.percentile(times, (10, 50, 90))
    return f"{median:8.2f} us [{low:.2f} .. {high:.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=576, help="float32 of one piece of work")
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    try:
        device = open_device(choose_device("cuda"))
    except DeviceUnavailable as error:
        print(f"no card to measure on: {error}")
        return 2
    count = options.values
    with device.alloc(8 * count, "area") as area:
        device.fill(area, 0)
        kernel = device.kernel("elementwise", "add_f32")
        x, y = area.view(0, 4 * count), area.view(4 * count)
        blocks = -(-count // 1024)

        def launch() -> None:
            device.launch(kernel, blocks, 256, (y, x, np.int64(count)))

        def launch_and_wait() -> None:
            launch()
            device.synchronize()

        def launches() -> None:
            for _ in range(IN_FLIGHT):
                launch()
            device.synchronize()

        launches()
        print(f"{device.name} ({device.arch}), {count} values a piece, {options.repeats} repeats")
        print(f"launch and wait          {measure(options.repeats, launch_and_wait)}")
        print(f"{IN_FLIGHT} launches, one wait    {measure(options.repeats // IN_FLIGHT, launches, IN_FLIGHT)} a piece")
        with PersistentWorker(device, area) as worker:
            worker.start()

            def submit_and_wait() -> None:
                worker.wait(worker.submit(1.0, 0, count, count))

            def submissions() -> None:
                for _ in range(IN_FLIGHT):
                    number = worker.submit(1.0, 0, count, count)
                worker.wait(number)

            submissions()
            print(f"submit and poll          {measure(options.repeats, submit_and_wait)}")
            print(
                f"{IN_FLIGHT} submissions, one poll {measure(options.repeats // IN_FLIGHT, submissions, IN_FLIGHT)} a piece"
            )
    device.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
