"""The prefetching loader: order, how far ahead it runs, and how it ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from megagraph_cli.graph import loader
from megagraph_cli.graph.loader import Begun, Prefetcher

PATIENCE_S = 20.0
SETTLE_S = 0.2


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_batches_come_in_order_and_each_once(count: int) -> None:
    with Prefetcher(lambda index: index * 10, count) as batches:
        assert list(batches) == [index * 10 for index in range(count)]
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_thread_runs_at_most_depth_batches_ahead_and_as_far_as_that(depth: int) -> None:
    begun = threading.Semaphore(0)
    taken, built = 0, 0
    ahead: list[int] = []

    def build(index: int) -> int:
        nonlocal built
        built += 1
        begun.release()
        return index

    with Prefetcher(build, 8, depth) as batches:
        for index in batches:
            taken += 1
            if index == 0:
                for _ in range(depth + 1):
                    assert begun.acquire(timeout=PATIENCE_S)
            time.sleep(SETTLE_S / 4)  # what is to be built too early is given the time for it
            ahead.append(built - taken)
    assert max(ahead) == depth
    assert built == taken == 8


def settled(built: list[int], least: int) -> int:
    """How many are built once there are ``least`` and what is too early was given the time for it."""
    end = time.monotonic() + PATIENCE_S
    while len(built) < least and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(SETTLE_S / 2)
    return len(built)


def test_a_thread_that_is_held_builds_when_room_is_made_for_it() -> None:
    built: list[int] = []
    with Prefetcher(built.append, 6, 2, holds=True) as batches:
        for index, _ in enumerate(batches):
            assert settled(built, min(6, index + 2)) == min(6, index + 2), "it went on before it was let"
            if index % 2:  # every other time the consumer forgets
                batches.make_room()
                batches.make_room()
                assert settled(built, min(6, index + 3)) == min(6, index + 3), "one more for every batch taken"
    assert built == list(range(6))
    assert not prefetch_threads()


@pytest.mark.parametrize("made", [False, True])
def test_a_held_thread_builds_what_there_was_room_for_when_the_consumer_leaves(made: bool) -> None:
    built: list[int] = []
    with Prefetcher(built.append, 100, 2, holds=True) as batches:
        for taken, _ in enumerate(batches, start=1):
            if taken == 5:
                if made:
                    batches.make_room()
                break
    assert built == list(range(7))
    assert not prefetch_threads()


def test_an_exception_reaches_the_consumer_as_it_was_raised() -> None:
    def build(index: int) -> int:
        if index == 2:
            try:
                raise KeyError("the cause")
            except KeyError as cause:
                raise ValueError("in the loader") from cause
        return index

    seen: list[int] = []

    def consume() -> None:
        with Prefetcher(build, 5) as batches:
            seen.extend(batches)

    with pytest.raises(ValueError, match="in the loader") as caught:
        consume()
    assert seen == [0, 1]
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback[-1].name == "build"
    assert not prefetch_threads()


def test_leaving_early_stops_the_thread() -> None:
    built: list[int] = []

    def build(index: int) -> int:
        built.append(index)
        return index

    with Prefetcher(build, 10**9) as batches:
        for index in batches:
            if index == 3:
                break
    assert not prefetch_threads()
    # The consumer took four; at most two more were ahead.
    assert len(built) <= 6


def test_leaving_by_an_exception_of_the_consumer_stops_the_thread_and_keeps_the_exception() -> None:
    def consume() -> None:
        with Prefetcher(lambda index: index, 100) as batches:
            for _ in batches:
                raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        consume()
    assert not prefetch_threads()


def test_waiting_for_a_batch_counts_as_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves only while a batch is built that the consumer already waits for: 3 s for each of two."""
    now = 0.0
    waiting = threading.Semaphore(0)

    def clock() -> float:
        waiting.release()
        return now

    def build(index: int) -> int:
        nonlocal now
        assert waiting.acquire(timeout=PATIENCE_S)
        now += 3.0
        return index

    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=clock))
    with Prefetcher(build, 1) as batches:
        assert list(batches) == [0]
    assert batches.stall_s == 3.0


def test_each_batch_but_the_first_is_ended_after_the_next_was_begun() -> None:
    events: list[str] = []
    build = Begun(
        lambda index: events.append(f"begin {index}") or index, lambda begun: events.append(f"end {begun}"), 4
    )
    for index in range(4):
        build(index)
    assert events == ["begin 0", "end 0", "begin 1", "begin 2", "end 1", "begin 3", "end 2", "end 3"]
