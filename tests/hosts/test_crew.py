"""Hosts that meet, agree, stop and fail together; all of them threads of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megagraph_cli import __version__
from megagraph_cli.errors import EXIT_INTERRUPTED, EXIT_STALE, EXIT_USAGE, EXIT_WORKER, MgraphError
from megagraph_cli.hosts import link
from megagraph_cli.hosts.address import Hosts, interface_of
from megagraph_cli.hosts.crew import Crew, FailedElsewhere, joined
from megagraph_cli.launch import free_port

Body = Callable[[Crew], Any]
PATIENCE_S = 60.0


@pytest.fixture
def hosts() -> Hosts:
    """Three hosts at a port of their own, seen from host 0."""
    return Hosts(3, 0, "127.0.0.1", free_port(), join_s=30.0)


def on(hosts: Hosts, body: Body, command: str = "train") -> Any:
    with joined(hosts, command) as crew:
        return body(crew)


def nothing(crew: Crew) -> None:
    pass


def on_all(hosts: Hosts, body: Body) -> list[Future[Any]]:
    """``body`` on every host; the last one comes first."""
    with threads(hosts.count) as pool:
        ranks = reversed(range(hosts.count))
        started = {rank: pool.submit(on, replace(hosts, rank=rank), body) for rank in ranks}
        wait(started.values(), timeout=PATIENCE_S)
    assert all(future.done() for future in started.values()), "a host waits for something that does not come"
    return [started[rank] for rank in range(hosts.count)]


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that is not waited for: a host that never ends fails its test instead of keeping it."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def error_of(future: Future[Any]) -> MgraphError:
    error = future.exception()
    assert isinstance(error, MgraphError), error
    return error


def test_one_host_has_everything_itself() -> None:
    assert on(Hosts(), lambda crew: (crew.exchange("x", 7), crew.interface, crew.report(), crew.stops)) == (
        [7],
        None,
        None,
        0,
    )


def test_all_hosts_have_the_values_of_all(hosts: Hosts) -> None:
    def body(crew: Crew) -> Any:
        mine = crew.hosts.rank
        return crew.exchange("first", mine), crew.from_first("second", lambda: [mine, "told"]), crew.interface

    loopback = interface_of("127.0.0.1")
    assert [future.result() for future in on_all(hosts, body)] == 3 * [([0, 1, 2], [0, "told"], loopback)]
    assert loopback is not None


def test_a_difference_is_named_on_all_hosts(hosts: Hosts) -> None:
    found = on_all(hosts, lambda crew: crew.agree("graph", "ab"[crew.hosts.rank // 2], "copy it"))
    for future in found:
        assert "have a different graph; copy it" in error_of(future).message
        assert error_of(future).exit_code == EXIT_STALE
    flags = on_all(replace(hosts, port=free_port()), lambda crew: crew.agree_on_flags([crew.hosts.rank == 1]))
    assert all(error_of(future).exit_code == EXIT_USAGE for future in flags)


def test_what_one_host_raises_ends_all_with_its_code(hosts: Hosts) -> None:
    def body(crew: Crew) -> Any:
        if crew.hosts.rank == 2:
            raise MgraphError("its disk is full; make room", 2)
        return crew.exchange("ready", True)

    first, second, failing = (error_of(future) for future in on_all(hosts, body))
    assert failing.message == "its disk is full; make room"
    for other in (first, second):
        assert (other.message, other.exit_code) == ("on host 2: its disk is full; make room", 2)
        assert isinstance(other, FailedElsewhere)


def test_an_interrupt_on_one_host_is_one_on_all(hosts: Hosts) -> None:
    def body(crew: Crew) -> Any:
        if crew.hosts.rank == 1:
            raise KeyboardInterrupt
        return crew.exchange("ready", True)

    found = on_all(hosts, body)
    assert isinstance(found[1].exception(), KeyboardInterrupt)
    assert {error_of(found[rank]).exit_code for rank in (0, 2)} == {EXIT_INTERRUPTED}


def test_a_cause_that_comes_after_its_echo_is_blamed(hosts: Hosts) -> None:
    def body(crew: Crew) -> Any:
        if crew.hosts.rank == 1:
            crew.tell_failure(MgraphError("connection lost"), echo=True)
            cause = crew.await_cause(20)
            assert cause is not None
            raise cause.error()
        if crew.hosts.rank == 2:
            while crew.report() is None:
                time.sleep(0.01)
            raise MgraphError("the cause", EXIT_WORKER)
        found = crew.await_cause(20)
        assert found is not None
        return found.message, found.host

    found = on_all(hosts, body)
    assert found[0].result() == ("the cause", 2)
    assert error_of(found[1]).message == "on host 2: the cause"


def test_a_stop_reaches_all_hosts_once(hosts: Hosts) -> None:
    def body(crew: Crew) -> int:
        if crew.hosts.rank == 1:
            crew.ask_stop(1)
        while not crew.stops:
            time.sleep(0.01)
        crew.exchange("seen", True)
        return crew.stops

    assert [future.result() for future in on_all(hosts, body)] == [1, 1, 1]


@pytest.mark.parametrize("silent", [False, True], ids=["closed", "silent"])
def test_a_host_that_is_gone_is_named(hosts: Hosts, silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if silent:
        monkeypatch.setattr(link.Link.receive, "__defaults__", (0.5,))
        monkeypatch.setattr("megagraph_cli.hosts.crew.ALIVE_S", 0.1)
    two = replace(hosts, count=2)
    met, over = threading.Event(), threading.Event()

    def dying() -> None:  # says hello as mgraph does, then nothing any more
        from megagraph_cli.hosts.meeting import call

        found = call(replace(two, rank=1), "train")
        met.set()
        if silent:
            over.wait(30)
        found.close()

    thread = threading.Thread(target=dying)
    thread.start()
    with pytest.raises(MgraphError, match=r"on host 1: it (has not been heard of|closed its connection)") as caught:
        on(two, lambda crew: (met.wait(10), crew.exchange("ready", True)))
    assert caught.value.exit_code == EXIT_WORKER
    over.set()
    thread.join(PATIENCE_S)


def test_a_host_that_never_comes_is_named_in_time(hosts: Hosts) -> None:
    short = replace(hosts, join_s=1.0)
    with threads(1) as pool:
        other = pool.submit(on, replace(short, rank=2, join_s=20.0), nothing)
        with pytest.raises(MgraphError, match=r"host 1 did not come to 127\.0\.0\.1:\d+ within 1 s") as caught:
            on(short, nothing)
    assert caught.value.exit_code == EXIT_WORKER
    assert "host 1 did not come" in error_of(other).message


def test_host_0_that_does_not_answer_is_named_in_time(hosts: Hosts) -> None:
    with pytest.raises(MgraphError, match="host 0 does not answer at") as caught:
        on(replace(hosts, rank=1, join_s=0.5), nothing)
    assert caught.value.exit_code == EXIT_WORKER


def test_the_last_value_reaches_all_although_host_0_leaves_at_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 knows the last value and leaves before the thread that received it goes on."""
    put = Crew._put

    def put_and_linger(crew: Crew, what: str, host: int, value: Any) -> None:
        put(crew, what, host, value)
        if threading.current_thread().name == link.FOLLOWER:
            time.sleep(0.3)

    monkeypatch.setattr(Crew, "_put", put_and_linger)
    found = on_all(hosts, lambda crew: crew.exchange("x", crew.hosts.rank))
    assert [future.result() for future in found] == 3 * [[0, 1, 2]]


def test_a_value_that_nobody_will_tell_is_not_waited_for(hosts: Hosts) -> None:
    found = on_all(hosts, lambda crew: crew.exchange("x", 1) if crew.hosts.rank == 1 else None)
    assert [future.exception() for future in (found[0], found[2])] == [None, None]
    assert "host 0 ended before it told host" in error_of(found[1]).message
    assert error_of(found[1]).exit_code == EXIT_WORKER


@pytest.mark.parametrize(
    ("theirs", "named"),
    [({"count": 3}, "--nnodes 3 but host 0 runs --nnodes 2"), ({"command": "profile"}, "mgraph profile but host 0")],
)
def test_hosts_that_were_told_otherwise_are_refused(hosts: Hosts, theirs: dict[str, Any], named: str) -> None:
    two = replace(hosts, count=2)
    count, command = theirs.get("count", 2), theirs.get("command", "train")
    with threads(1) as pool:
        other = pool.submit(on, replace(two, rank=1, count=count), nothing, command)
        with pytest.raises(MgraphError, match=named):
            on(two, nothing)
    assert named in error_of(other).message


def test_a_rank_given_twice_and_a_stranger_leave_the_others_in_peace(hosts: Hosts) -> None:
    with threads(4) as pool:
        first = pool.submit(on, hosts, lambda crew: crew.exchange("x", 0))
        with socket.create_connection(_once_listening(hosts)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection(_once_listening(hosts)) as stranger:
            stranger.sendall(b'{"kind": "greetings"}\n')
        both = [pool.submit(on, replace(hosts, rank=1), lambda crew: crew.exchange("x", 1)) for _ in range(2)]
        refused = next(as_completed(both, PATIENCE_S))  # whichever called later; the other one waits for host 2
        assert "two hosts say --node-rank 1" in error_of(refused).message
        two = pool.submit(on, replace(hosts, rank=2), lambda crew: crew.exchange("x", 2))
        (one,) = (future for future in both if future is not refused)
        assert [future.result(PATIENCE_S) for future in (first, one, two)] == 3 * [[0, 1, 2]]


def test_a_host_may_be_stopped_and_started_again_before_all_have_come(hosts: Hosts) -> None:
    with threads(3) as pool:
        first = pool.submit(on, hosts, lambda crew: crew.exchange("x", 0))
        with socket.create_connection(_once_listening(hosts)) as stopped:
            hello = {"kind": "hello", "rank": 1, "count": 3, "command": "train", "version": __version__}
            stopped.sendall(json.dumps(hello).encode() + b"\n")
            time.sleep(0.5)
        one = pool.submit(on, replace(hosts, rank=1), lambda crew: crew.exchange("x", 1))
        two = pool.submit(on, replace(hosts, rank=2), lambda crew: crew.exchange("x", 2))
        assert [future.result(PATIENCE_S) for future in (first, one, two)] == 3 * [[0, 1, 2]]


def _once_listening(hosts: Hosts) -> tuple[str, int]:
    address = (hosts.address, hosts.port)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(address) == 0:
                return address
        time.sleep(0.05)
    raise AssertionError("host 0 does not listen")


def test_the_port_is_free_for_torchrun_once_all_have_met(hosts: Hosts) -> None:
    def body(crew: Crew) -> None:
        if crew.hosts.first:
            with socket.create_server(("", crew.hosts.port)):
                pass
        crew.exchange("bound", True)

    assert [future.result() for future in on_all(hosts, body)] == [None] * 3


@pytest.mark.parametrize(
    ("nnodes", "rank", "endpoint", "named"),
    [
        (2, None, "first:1", "--node-rank"),
        (2, 0, None, "--rdzv-endpoint"),
        (2, 2, "first:1", "--node-rank 2 is none of 2"),
        (2, 0, "first", "no HOST:PORT"),
        (2, 0, "first:70000", "no HOST:PORT"),
        (1, 1, None, "--nnodes"),
        (5000, 0, "first:1", "--nnodes 5000"),
    ],
)
def test_flags_that_say_too_little_or_too_much(nnodes: int, rank: int | None, endpoint: str | None, named: str) -> None:
    with pytest.raises(MgraphError, match=named) as caught:
        Hosts.of(nnodes, rank, endpoint)
    assert caught.value.exit_code == EXIT_USAGE


def test_workers_must_be_shared_equally() -> None:
    assert Hosts(2, 0, "first", 1).share(6) == 3
    with pytest.raises(MgraphError, match="multiple of 2"):
        Hosts(2, 0, "first", 1).share(5)


def test_host_0s_address_must_be_its_own() -> None:
    with pytest.raises(MgraphError, match="not an address of this host"):
        on(Hosts(2, 0, "192.0.2.1", free_port()), nothing)  # a documentation address: nobody's
