"""A prefetching loader: the next batches are built on a host thread while the current step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Batch = TypeVar("Batch")


class Prefetcher(Generic[Batch]):
    """Iterates over ``build(0), build(1), ... build(count - 1)``, at most ``depth`` batches ahead of the consumer.

    ``stall_s`` is the time the consumer waited for a batch. An exception inside ``build`` is raised to the
    consumer with its own cause. Use it as a context manager: leaving it stops the thread.
    """

    def __init__(self, build: Callable[[int], Batch], count: int, depth: int = 2) -> None:
        self._build = build
        self._count = count
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
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
        self._room.release()
        self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._count):
            start = time.perf_counter()
            item = self._ready.get()
            self.stall_s += time.perf_counter() - start
            self._room.release()
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        for index in range(self._count):
            # Room is taken before a batch is built: one that is built and waits for room would be one too many.
            self._room.acquire()
            if self._stop.is_set():
                return
            try:
                self._ready.put(self._build(index))
            except BaseException as error:  # handed to the consumer, which raises it
                self._ready.put(error)
                return
