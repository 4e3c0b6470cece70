"""What `CudaOps.record` makes of a step: launched anew each time, or captured once and replayed as a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

from m40llm.device.protocol import Device, Graph

log = logging.getLogger("m40llm.steps")


class EagerStep:
    """Launches every kernel anew."""

    def __init__(self, body: Callable[[], None]):
        self.run = body


class GraphStep:
    """Runs eagerly once, which loads the kernels, then captures, then replays. Owns its graph.

    `timed` measures each replay by events, waits for its end and logs the milliseconds.
    """

    def __init__(self, device: Device, body: Callable[[], None], timed: bool = False):
        self._device = device
        self._events = (device.event(), device.event()) if timed else None
        self._body = body
        self._warm = False
        self._graph: Graph | None = None

    def run(self) -> None:
        if not self._warm:
            self._warm = True
            self._body()
            return
        if self._graph is None:
            with self._device.capture() as graph:
                self._body()
            self._graph = graph
        if self._events is None:
            self._device.replay(self._graph)
            return
        start, end = self._events
        self._device.record(start)
        self._device.replay(self._graph)
        self._device.record(end)
        end.synchronize()
        log.info("decode graph: replayed in %.3f ms", end.elapsed_ms(start))

    def close(self) -> None:
        """Frees the graph; may be called twice."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()

    def __del__(self) -> None:
        self.close()
