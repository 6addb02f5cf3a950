"""A prefetching loader: the next batches are built on a host thread while the current step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Batch = TypeVar("Batch")
Start = TypeVar("Start")

_PATIENCE_S = 5.0
"""A thread that another rank's end may have left waiting is not waited for longer, once this rank fails."""


class Prefetcher(Generic[Batch]):
    """Iterates over ``build(0), build(1), ... build(count - 1)``, at most ``depth`` batches ahead of the consumer.

    ``stall_s`` is the time the consumer waited for a batch. An exception inside ``build`` is raised to the
    consumer with its own cause. Use it as a context manager: leaving it stops the thread. What a consumer that
    leaves early had room for is still built, so that ranks which build together and leave at the same batch have
    built the same ones.

    Taking a batch makes room for another. With ``holds`` only ``make_room`` does, or asking for the next batch: a
    consumer that computes on the thread's own cores calls it when it starts to wait for others, and loses less.
    """

    def __init__(self, build: Callable[[int], Batch], count: int, depth: int = 2, *, holds: bool = False) -> None:
        self._build = build
        self._count = count
        self._depth = depth
        self._holds = holds
        self._owes_room = False
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._taken = 0
        self._end = count
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self.stall_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = min(self._count, self._taken + self._depth) if error is None else 0
        self.make_room()
        self._room.release()
        self._thread.join(None if error is None else _PATIENCE_S)

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._count):
            self.make_room()
            start = time.perf_counter()
            item = self._ready.get()
            self.stall_s += time.perf_counter() - start
            self._taken += 1
            self._owes_room = True
            if not self._holds:
                self.make_room()
            if isinstance(item, BaseException):
                raise item
            yield item

    def make_room(self) -> None:
        """Let the thread go on, once for every batch taken."""
        if self._owes_room:
            self._owes_room = False
            self._room.release()

    def _work(self) -> None:
        for index in range(self._count):
            # Room is taken before a batch is built: one that is built and waits for room would be one too many.
            self._room.acquire()
            if index >= self._end:
                return
            try:
                self._ready.put(self._build(index))
            except BaseException as error:  # handed to the consumer, which raises it
                self._ready.put(error)
                return


class Begun(Generic[Start, Batch]):
    """``end(begin(index))`` for index 0, 1, ... in order, the next one begun before each but the first is ended.

    What ``begin`` asks of the disk is then under way while the batch before is put together. The first is not kept
    waiting: nothing computes yet.
    """

    def __init__(self, begin: Callable[[int], Start], end: Callable[[Start], Batch], count: int) -> None:
        self._begin, self._end, self._count = begin, end, count
        self._ahead: deque[Start] = deque()

    def __call__(self, index: int) -> Batch:
        if not self._ahead:
            self._ahead.append(self._begin(index))
        if 0 < index < self._count - 1:
            self._ahead.append(self._begin(index + 1))
        return self._end(self._ahead.popleft())
