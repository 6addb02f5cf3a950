"""A prefetching loader: the next batches are built on a host thread while the current step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Batch = TypeVar("Batch")

_POLL_S = 0.1


class Prefetcher(Generic[Batch]):
    """Iterates over ``build(0), build(1), ... build(count - 1)``, at most ``depth`` batches ahead.

    ``stall_s`` is the time the consumer waited for a batch. An exception inside ``build`` is raised to the
    consumer with its own cause. Use it as a context manager: leaving it stops the thread.
    """

    def __init__(self, build: Callable[[int], Batch], count: int, depth: int = 2) -> None:
        self._build = build
        self._count = count
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self.stall_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._count):
            start = time.perf_counter()
            item = self._ready.get()
            self.stall_s += time.perf_counter() - start
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        for index in range(self._count):
            try:
                item: Batch | BaseException = self._build(index)
            except BaseException as error:  # handed to the consumer, which raises it
                item = error
            if not self._hand_over(item) or isinstance(item, BaseException):
                return

    def _hand_over(self, item: Batch | BaseException) -> bool:
        """Put the item in the queue; False when the consumer has left."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
