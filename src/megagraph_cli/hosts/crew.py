"""All hosts of one call: they agree on values, stop together, and end together when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megagraph_cli.artifacts.run import Failure
from megagraph_cli.errors import EXIT_INTERRUPTED, EXIT_STALE, EXIT_UNEXPECTED, EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.address import Hosts, interface_of
from megagraph_cli.hosts.link import ALIVE_S, Link, Message
from megagraph_cli.hosts.meeting import call, welcome

_LAST_WORDS_S = 3.0
"""Seconds that links are kept open for what others still have to say."""


class FailedElsewhere(WorkerFailed):
    """Another host's failure, raised here."""


@dataclass(frozen=True)
class Report:
    """Why another host ended. ``echo``: it only lost its connection to one that failed before."""

    host: int
    message: str
    exit_code: int
    failure: dict[str, Any]
    echo: bool

    def error(self) -> FailedElsewhere:
        """The failure as every other host raises it."""
        message = f"on host {self.host}: {self.message}"
        return FailedElsewhere(message, Failure.model_validate(self.failure | {"message": message}), self.exit_code)


class Crew:
    """This host among the others. With one host everything here is its own and nothing is sent.

    Host 0 has a link to every other host and passes on what one of them tells; the others have one to host 0.
    """

    def __init__(self, hosts: Hosts, links: dict[int, Link]) -> None:
        self.hosts = hosts
        self._links = links
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}
        self._reports: list[Report] = []
        self._done: set[int] = set()
        self._ended: set[int] = set()
        self._stops = 0
        self._closing = threading.Event()
        self._threads = [
            link.follow(partial(self._told, rank), partial(self._lost, rank)) for rank, link in links.items()
        ]
        threading.Thread(target=self._stay_in_touch, name="host-alive", daemon=True).start()

    @property
    def interface(self) -> str | None:
        """The network interface at which the other hosts are; None with one host, or where it is not known."""
        link = next(iter(self._links.values()), None)
        return None if link is None else interface_of(link.own_address)

    @property
    def stops(self) -> int:
        """How many times the user asked any host to stop."""
        with self._changed:
            return self._stops

    def ask_stop(self, count: int) -> None:
        """The user has asked this host to stop ``count`` times by now: all hosts do as they would there."""
        with self._changed:
            self._stops = max(self._stops, count)
        self._tell({"kind": "stop", "count": count})

    def report(self) -> Report | None:
        """Why another host ended, if one did: the cause rather than its echo."""
        with self._changed:
            return min(self._reports, key=lambda report: report.echo, default=None)

    def await_cause(self, seconds: float) -> Report | None:
        """A report of another host that is no echo, if one comes in time."""
        deadline = time.monotonic() + seconds
        while not self._closing.is_set() and time.monotonic() < deadline:
            found = self.report()
            if found is not None and not found.echo:
                return found
            time.sleep(0.05)
        return None

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Every host's value, by rank, once all have given theirs; all hosts call it. Values are plain JSON.

        Raises MgraphError, as it was raised there, where another host ended instead.
        """
        self._put(what, self.hosts.rank, mine)
        self._tell({"kind": "value", "what": what, "host": self.hosts.rank, "value": mine})
        with self._changed:
            while len(self._values[what]) < self.hosts.count:
                if self._reports:
                    raise min(self._reports, key=lambda report: report.echo).error()
                self._raise_if_out_of_reach(what)
                self._changed.wait(0.2)  # not for ever: a signal must come through
            values = self._values.pop(what)
        return [values[rank] for rank in range(self.hosts.count)]

    def _raise_if_out_of_reach(self, what: str) -> None:
        """Whoever would tell a value that is missing has ended, well by its own account: it will never come."""
        missing = set(range(self.hosts.count)) - self._values[what].keys()
        gone = self._ended & (missing if self.hosts.first else {0})
        if gone:
            raise MgraphError(
                f"host {min(gone)} ended before it told host {min(missing)}'s {what}; "
                "run the command again on every host",
                EXIT_WORKER,
            )

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on host 0, on every host."""
        return self.exchange(what, make() if self.hosts.first else None)[0]

    def agree(self, what: str, mine: str, way_out: str) -> None:
        """That a value is the same on all hosts. Raises MgraphError (exit 4) that advises ``way_out``."""
        for rank, value in enumerate(self.exchange(what, mine)):
            if value != mine:
                first, other = sorted((self.hosts.rank, rank))
                raise MgraphError(f"hosts {first} and {other} have a different {what}; {way_out}", EXIT_STALE)

    def agree_on_flags(self, flags: list[Any]) -> None:
        """That what workers must do alike was asked for on all hosts. Raises MgraphError (exit 2)."""
        for rank, theirs in enumerate(self.exchange("flags", flags)):
            if theirs != flags:
                first, other = sorted((self.hosts.rank, rank))
                raise MgraphError(f"hosts {first} and {other} were given different flags; run the same command on each")

    def _tell(self, message: Message, but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but:
                link.send(message)

    def _stay_in_touch(self) -> None:
        while self._links and not self._closing.wait(ALIVE_S):
            self._tell({"kind": "alive"})

    def _told(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        # Passed on before it is known here: knowing it may be all that this host still waits for before it leaves.
        if kind != "alive" and self.hosts.first:
            self._tell(message, but=rank)
        if kind == "value":
            self._put(message["what"], message["host"], message["value"])
        elif kind == "stop":
            with self._changed:
                self._stops = max(self._stops, message["count"])
        elif kind == "failed":
            self._add(Report(**message["report"]))
        elif kind == "done":
            with self._changed:
                self._done.add(message["host"])

    def _lost(self, rank: int, why: str) -> None:
        with self._changed:
            known = rank in self._done or any(report.host == rank for report in self._reports)
        if not known and not self._closing.is_set():
            self._report_lost(rank, why)
        with self._changed:  # after the report, which says more
            self._ended.add(rank)
            self._changed.notify_all()

    def _report_lost(self, rank: int, why: str) -> None:
        message = f"it {why} before it was done; look at its own message, then start again on every host"
        report = Report(rank, message, EXIT_WORKER, _failure_of(message), echo=False)
        if self.hosts.first:
            self._tell({"kind": "failed", "report": vars(report)}, but=rank)
        self._add(report)

    def _put(self, what: str, host: int, value: Any) -> None:
        with self._changed:
            self._values.setdefault(what, {})[host] = value
            self._changed.notify_all()

    def _add(self, report: Report) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def tell_failure(self, error: BaseException, *, echo: bool = False) -> None:
        """That this host ends, and why."""
        if not self._links:
            return
        if isinstance(error, MgraphError):
            message, exit_code = error.message, error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            message, exit_code = "it was interrupted; run the command again on every host", EXIT_INTERRUPTED
        else:
            message, exit_code = f"unexpected {type(error).__name__}: {error}", EXIT_UNEXPECTED
        failure = error.failure.model_dump(mode="json") if isinstance(error, WorkerFailed) else _failure_of(message)
        report = Report(self.hosts.rank, message, exit_code, failure, echo)
        self._tell({"kind": "failed", "report": vars(report)})

    def leave(self) -> None:
        """Say that all is well here, let others say their last words, and hang up."""
        self._tell({"kind": "done", "host": self.hosts.rank})
        self._closing.set()
        for link in self._links.values():
            link.finish()
        deadline = time.monotonic() + _LAST_WORDS_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for link in self._links.values():
            link.close()


def _failure_of(message: str) -> dict[str, Any]:
    return Failure(rank=None, pp=None, dp=None, cp=None, message=message).model_dump(mode="json")


@contextmanager
def joined(hosts: Hosts, command: str) -> Iterator[Crew]:
    """All hosts of ``mgraph <command>`` while they work together; what one raises ends all.

    Raises MgraphError (exit 2 or 5) where they do not find each other.
    """
    if hosts.count == 1:
        yield Crew(hosts, {})
        return
    crew = Crew(hosts, welcome(hosts, command) if hosts.first else {0: call(hosts, command)})
    try:
        yield crew
    except BaseException as error:
        crew.tell_failure(error, echo=isinstance(error, FailedElsewhere))
        raise
    finally:
        crew.leave()
