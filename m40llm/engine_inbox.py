"""Inbox: where requests wait for the engine's thread, and what wakes it. Everything here is under one lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from m40llm.generation import Generation
from m40llm.request import EngineClosed, QueueFull, RequestError


class Orders(NamedTuple):
    """What the engine's thread finds: requests, those who wait for `Inbox.saved`, and whether it is time to leave."""

    arrived: list[Generation]
    saved: list[Future[None]]
    closing: bool


class Inbox:
    """Handlers put requests in, the engine's thread takes them out and says when they have ended.

    Args:
        n_slots: requests that run at once.
        max_queue: requests that may wait beside those (None: any number).
    """

    def __init__(self, n_slots: int, max_queue: int | None) -> None:
        self._n_slots = n_slots
        self._max_queue = max_queue
        self._arrived: deque[Generation] = deque()
        self._saved: list[Future[None]] = []
        self._open = 0
        self._changed = threading.Condition()
        self._nudged = False
        self._draining = False
        self._closing = False
        self._failure: BaseException | None = None

    @property
    def open(self) -> int:
        """Requests that were put in and have not ended."""
        return self._open

    @property
    def failure(self) -> BaseException | None:
        """What `fail` was told."""
        return self._failure

    # -- any thread ----------------------------------------------------------------------------------
    def put(self, generations: Sequence[Generation]) -> None:
        """Takes all of them or none.

        Raises:
            EngineClosed: after `stop_admitting`, `close` or `fail`.
            QueueFull, RequestError: as `check_room`.
        """
        with self._changed:
            if self._failure is not None or self._draining or self._closing:
                raise self.closed()
            self._check_room(len(generations))
            self._open += len(generations)
            for generation in generations:
                generation.queued()
            self._arrived.extend(generations)
            self._changed.notify()

    def check_room(self, count: int) -> None:
        """Raises QueueFull if `count` requests would not be taken now, and RequestError if they never would."""
        with self._changed:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        if self._max_queue is None:
            return
        limit = self._n_slots + self._max_queue
        if count > limit:
            raise RequestError(
                f"{count} sequences in one request are more than {self._n_slots} slots and {self._max_queue} places in the "
                "queue; ask for fewer or raise --max-queue"
            )
        if self._open + count > limit:
            raise QueueFull(
                f"{self._open} requests are running or waiting, {limit} are the limit (--slots plus --max-queue); try again later"
            )

    def saved(self) -> Future[None]:
        """Done once all that ended requests have left in their slots is in the prefix cache.

        Raises:
            EngineClosed: after `close` or `fail`; the future may hold one, too.
        """
        with self._changed:
            if self._failure is not None or self._closing:
                raise self.closed()
            saved: Future[None] = Future()
            self._saved.append(saved)
            self._changed.notify()
            return saved

    def closed(self) -> EngineClosed:
        """What those are told who come too late."""
        if self._failure is not None:
            return EngineClosed(f"the engine has failed: {self._failure}; restart it")
        return EngineClosed("the engine is shutting down")

    def arrived(self) -> list[Generation]:
        """Those that the engine's thread has not seen yet."""
        with self._changed:
            return list(self._arrived)

    def nudge(self) -> None:
        """Something other than a request has changed: the engine's thread is to look."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def stop_admitting(self) -> None:
        with self._changed:
            self._draining = True

    def close(self) -> None:
        """Tells the engine's thread to leave."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # -- the engine's thread -------------------------------------------------------------------------
    def take(self) -> Orders:
        """What has come since the last call."""
        with self._changed:
            orders = Orders(list(self._arrived), self._saved, self._closing)
            self._arrived.clear()
            self._saved = []
            self._nudged = False
            return orders

    def wait(self, timeout: float | None) -> None:
        """Sleeps until there is something to take or `timeout` seconds are over."""
        with self._changed:
            if not (self._arrived or self._saved or self._nudged or self._closing):
                self._changed.wait(timeout)

    def ended(self) -> None:
        """One request has."""
        with self._changed:
            self._open -= 1

    def fail(self, error: BaseException) -> None:
        """Nothing is taken from now on: the engine itself is broken."""
        with self._changed:
            self._failure = error
