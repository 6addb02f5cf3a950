"""A worker module and a job -> a torchrun process group, watched until it ends; nothing outlives a launch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from megagraph_cli import tether
from megagraph_cli.errors import EXIT_INTERRUPTED, MgraphError
from megagraph_cli.failures import (
    LAUNCHER_LOG,
    PlaceOf,
    WorkerFailed,
    clear_failures,
    find_failure,
    has_failures,
    launcher_log,
    only_signalled,
)
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.hosts.crew import Crew, Report
from megagraph_cli.machine import threads_per_worker
from megagraph_cli.processes import MARK, TERMINATE_S, descendants, kill_all, marked, send_signal

POLL_S = 0.1
STOP_S = 60.0
"""Seconds that workers have to reach a step boundary after the first signal."""
FAILING_S = 15.0
"""Seconds that the other workers have to end after one failed."""
CAUSE_S = 20.0
"""Seconds that a host whose workers only lost their connection waits for another one's reason."""
ELSEWHERE_S = 2.0
"""Seconds that workers here have to see for themselves that a host has failed."""
_ONE_SIGNAL_S = 0.5


@dataclass(frozen=True)
class Launch:
    """One process group to start, or this host's part of it.

    ``worker_module`` is run with ``job_path`` as its one argument by ``num_workers`` workers on every host of ``crew``,
    which log under ``log_dir``. ``stop_file`` is created to ask workers to stop at a step boundary; without one a
    signal kills them at once. ``threads`` of each worker; None: its share of the host's cores. ``place_of`` names a
    rank's place in the mesh. ``on_poll`` is called about ten times a second.
    """

    worker_module: str
    job_path: Path
    num_workers: int
    log_dir: Path
    stop_file: Path | None = None
    place_of: PlaceOf | None = None
    on_poll: Callable[[], None] = field(default=lambda: None)
    crew: Crew = field(default_factory=lambda: Crew(Hosts(), {}))
    threads: int | None = None
    stop_s: float = STOP_S
    failing_s: float = FAILING_S


@dataclass(frozen=True)
class Outcome:
    """How a launch that did not fail ended: by itself, or ``interrupted`` by a signal (``killed``: not in time)."""

    interrupted: bool = False
    killed: bool = False


def torchrun_command(worker_module: str, job_path: Path, num_workers: int, hosts: Hosts) -> list[str]:
    """The torchrun command line of one launch on this host, which starts ``num_workers`` of its workers.

    The rendezvous is static: host 0 is known, and does not have to recognise itself.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={hosts.count}",
        f"--node-rank={hosts.rank}",
        f"--nproc-per-node={num_workers}",
        f"--master-addr={hosts.address}",
        f"--master-port={hosts.port}",
        "--monitor-interval=0.1",
        "--max-restarts=0",
        "-m",
        worker_module,
        str(job_path),
    ]


def on_free_port(hosts: Hosts) -> Hosts:
    """One host with a port that nobody listens on now; several as they are."""
    return hosts if hosts.count > 1 else replace(hosts, port=free_port())


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(spec: Launch) -> Outcome:
    """Start the workers, watch them until they end, and leave no process behind.

    The first SIGINT, SIGTERM or SIGHUP asks workers to stop, on all hosts; a second one or ``stop_s`` seconds kill.
    Raises WorkerFailed (exit 5 or the worker's own code) naming the first rank that failed, on whichever host.
    """
    try:
        return _attempt(spec)
    except WorkerFailed as error:
        # The port was free when we asked and taken when torchrun bound it: one more try with another.
        if not _address_in_use(spec.log_dir) or spec.crew.hosts.count > 1:
            raise _first_cause(spec.crew, error) from error
    return _attempt(spec)


def _first_cause(crew: Crew, error: WorkerFailed) -> WorkerFailed:
    """The failure that is to blame: this host's own, or another's where this one only echoes it."""
    if crew.hosts.count == 1:
        return error
    known = crew.report()
    if not error.echo and (known is None or known.echo):
        return error
    crew.tell_failure(error, echo=True)
    cause = crew.await_cause(CAUSE_S)
    return error if cause is None else cause.error()


def _attempt(spec: Launch) -> Outcome:
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    clear_failures(spec.log_dir)
    mark = uuid.uuid4().hex
    # Entered before anything starts: a signal that comes while torchrun starts must not leave it behind.
    # torchrun makes a folder for logs that it does not write here, and would leave it where temporary files go.
    scratch = spec.log_dir / ".torchrun"
    with _counted_signals() as signals, (spec.log_dir / LAUNCHER_LOG).open("wb") as log:
        command = torchrun_command(spec.worker_module, spec.job_path, spec.num_workers, on_free_port(spec.crew.hosts))
        command.insert(command.index("-m", 3), f"--log-dir={scratch}")
        process = subprocess.Popen(
            _tethered(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(spec, mark),
            start_new_session=True,
        )
        watch = _Watch(spec, process, mark, signals)
        try:
            watch.until_ended()
        finally:
            kill_all(process, mark)
            shutil.rmtree(scratch, ignore_errors=True)
    if watch.failed_elsewhere is not None:
        raise watch.failed_elsewhere.error()
    stopped = process.returncode == 0 or only_signalled(spec.log_dir)
    if watch.asked and (watch.killed or stopped):
        return Outcome(interrupted=True, killed=watch.killed)
    if process.returncode != 0:
        raise find_failure(spec.log_dir, spec.place_of, killed_hanging=watch.killed_hanging)
    return Outcome()


def _tethered(command: list[str]) -> list[str]:
    """The same module in a process that ends with this one; ``command`` is ``python -m MODULE ARGUMENT ...``."""
    python, _, *module = command
    return [python, "-m", tether.__name__, str(os.getpid()), *module]


def _environment(spec: Launch, mark: str) -> dict[str, str]:
    # Libraries would guess the interface from the host's name; what the user has set for them stands.
    interface = spec.crew.interface
    found = {} if interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return (
        found
        | os.environ
        | {
            "OMP_NUM_THREADS": str(spec.threads or threads_per_worker(spec.num_workers)),
            "PYTHONUNBUFFERED": "1",
            "MGRAPH_LOG_DIR": str(spec.log_dir),
            MARK: mark,
        }
    )


def _address_in_use(log_dir: Path) -> bool:
    text = launcher_log(log_dir).lower()
    return "eaddrinuse" in text or "address already in use" in text


class _Watch:
    """Follows one torchrun process until it ends, is stopped or is killed."""

    def __init__(self, spec: Launch, process: subprocess.Popen[bytes], mark: str, signals: _Signals) -> None:
        self.spec = spec
        self.process = process
        self.mark = mark
        self.signals = signals
        self.killed = False
        self.killed_hanging = False
        self.failed_elsewhere: Report | None = None
        self._stopping_since: float | None = None
        self._failing_since: float | None = None
        self._elsewhere_since: float | None = None
        self._log_bytes = 0

    @property
    def asked(self) -> int:
        """How many times the user asked for a stop, on this host or another."""
        return max(self.signals.count, self.spec.crew.stops)

    def until_ended(self) -> None:
        while self.process.poll() is None and not self._given_up():
            self.spec.on_poll()
            self._follow_signals()
            self._follow_failures()
            self._follow_hosts()
            time.sleep(POLL_S)
        self._await_orphans()
        self.spec.on_poll()

    def _given_up(self) -> bool:
        return self.killed or self._torchrun_hangs() or self.failed_elsewhere is not None

    def _follow_hosts(self) -> None:
        """End with a host that failed; workers here have a moment to say why, longer where they may know better."""
        report = self.spec.crew.report()
        if report is None:
            return
        self._elsewhere_since = self._elsewhere_since or time.monotonic()
        if time.monotonic() - self._elsewhere_since > (self.spec.failing_s if report.echo else ELSEWHERE_S):
            self.failed_elsewhere = report

    def _await_orphans(self) -> None:
        """Let workers reach their step boundary although torchrun died of the signal that also reached us."""
        while self.asked and not self._given_up() and marked(self.mark):
            self.spec.on_poll()
            self._follow_signals()
            time.sleep(POLL_S)

    def _follow_signals(self) -> None:
        if self.signals.count > self.spec.crew.stops:
            self.spec.crew.ask_stop(self.signals.count)
        if not self.asked:
            return
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
            if self.spec.stop_file is not None:
                self.spec.stop_file.touch()
        out_of_time = now - self._stopping_since > self.spec.stop_s
        self.killed = self.spec.stop_file is None or self.asked > 1 or out_of_time

    def _follow_failures(self) -> None:
        if self.asked and not has_failures(self.spec.log_dir):
            # A signal to the whole process tree makes torchrun close its workers: that is no failure of theirs.
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = time.monotonic() if self._is_failing() else None
        elif time.monotonic() - self._failing_since > self.spec.failing_s and not self.killed_hanging:
            # The workers alone: torchrun then writes its report, which names the rank that failed first.
            self.killed_hanging = True
            for worker in descendants(self.process):
                send_signal(worker, signal.SIGKILL)

    def _torchrun_hangs(self) -> bool:
        if self._failing_since is None:
            return False
        return time.monotonic() - self._failing_since > self.spec.failing_s + TERMINATE_S

    def _is_failing(self) -> bool:
        if has_failures(self.spec.log_dir):
            return True
        size = (self.spec.log_dir / LAUNCHER_LOG).stat().st_size
        if size == self._log_bytes:
            return False
        self._log_bytes = size
        return "closing signal" in launcher_log(self.spec.log_dir)


@dataclass
class _Signals:
    """How many times the user asked to stop; a burst (terminal and process manager both) counts once."""

    count: int = 0
    _last: float = -_ONE_SIGNAL_S

    def receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now - self._last >= _ONE_SIGNAL_S:
            self.count += 1
        self._last = now


@contextmanager
def _counted_signals() -> Iterator[_Signals]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying from them; Python allows this in the main thread alone."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # started under nohup: stay
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, signals.receive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupted(what: str, way_on: str) -> MgraphError:
    """The error (exit 130) of a command that a signal ended."""
    return MgraphError(f"{what} was interrupted; {way_on}", EXIT_INTERRUPTED)
