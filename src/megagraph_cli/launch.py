"""A worker module and a job -> a torchrun process group, watched until it ends; nothing outlives a launch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

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
from megagraph_cli.machine import threads_per_worker

POLL_S = 0.1
STOP_S = 60.0
"""Seconds that workers have to reach a step boundary after the first signal."""
FAILING_S = 15.0
"""Seconds that the other workers have to end after one failed."""
TERMINATE_S = 5.0
_MARK = "MGRAPH_LAUNCH_ID"
_ONE_SIGNAL_S = 0.5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """One process group to start.

    ``worker_module`` is run with ``job_path`` as its one argument by ``num_workers`` workers, which log under
    ``log_dir``. ``stop_file`` is created to ask workers to stop at a step boundary; without one a signal kills
    them at once. ``place_of`` names a rank's place in the mesh. ``on_poll`` is called about ten times a second.
    """

    worker_module: str
    job_path: Path
    num_workers: int
    log_dir: Path
    stop_file: Path | None = None
    place_of: PlaceOf | None = None
    on_poll: Callable[[], None] = field(default=lambda: None)
    stop_s: float = STOP_S
    failing_s: float = FAILING_S


@dataclass(frozen=True)
class Outcome:
    """How a launch that did not fail ended: by itself, or ``interrupted`` by a signal (``killed``: not in time)."""

    interrupted: bool = False
    killed: bool = False


def torchrun_command(worker_module: str, job_path: Path, num_workers: int, port: int) -> list[str]:
    """The torchrun command line of one launch on this host."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={num_workers}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--monitor-interval=0.1",
        "--max-restarts=0",
        "-m",
        worker_module,
        str(job_path),
    ]


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(spec: Launch) -> Outcome:
    """Start the workers, watch them until they end, and leave no process behind.

    The first SIGINT, SIGTERM or SIGHUP asks workers to stop, a second one or ``stop_s`` seconds kill them.
    Raises WorkerFailed (exit 5 or the worker's own code) naming the first rank that failed.
    """
    try:
        return _attempt(spec)
    except WorkerFailed:
        # The port was free when we asked and taken when torchrun bound it: one more try with another.
        if not _address_in_use(spec.log_dir):
            raise
    return _attempt(spec)


def _attempt(spec: Launch) -> Outcome:
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    clear_failures(spec.log_dir)
    mark = uuid.uuid4().hex
    # Entered before anything starts: a signal that comes while torchrun starts must not leave it behind.
    with _counted_signals() as signals, (spec.log_dir / LAUNCHER_LOG).open("wb") as log:
        process = subprocess.Popen(
            torchrun_command(spec.worker_module, spec.job_path, spec.num_workers, free_port()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(spec, mark),
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, os.getpid()),
        )
        watch = _Watch(spec, process, mark, signals)
        try:
            watch.until_ended()
        finally:
            kill_all(process, mark)
    stopped = process.returncode == 0 or only_signalled(spec.log_dir)
    if signals.count and (watch.killed or stopped):
        return Outcome(interrupted=True, killed=watch.killed)
    if process.returncode != 0:
        raise find_failure(spec.log_dir, spec.place_of, killed_hanging=watch.killed_hanging)
    return Outcome()


def _environment(spec: Launch, mark: str) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": str(threads_per_worker(spec.num_workers)),
        "PYTHONUNBUFFERED": "1",
        "MGRAPH_LOG_DIR": str(spec.log_dir),
        _MARK: mark,
    }


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
        self._stopping_since: float | None = None
        self._failing_since: float | None = None
        self._log_bytes = 0

    def until_ended(self) -> None:
        while self.process.poll() is None and not self.killed and not self._torchrun_hangs():
            self.spec.on_poll()
            self._follow_signals()
            self._follow_failures()
            time.sleep(POLL_S)
        self._await_orphans()
        self.spec.on_poll()

    def _await_orphans(self) -> None:
        """Let workers reach their step boundary although torchrun died of the signal that also reached us."""
        while self.signals.count and not self.killed and _marked(self.mark):
            self.spec.on_poll()
            self._follow_signals()
            time.sleep(POLL_S)

    def _follow_signals(self) -> None:
        if not self.signals.count:
            return
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
            if self.spec.stop_file is not None:
                self.spec.stop_file.touch()
        out_of_time = now - self._stopping_since > self.spec.stop_s
        self.killed = self.spec.stop_file is None or self.signals.count > 1 or out_of_time

    def _follow_failures(self) -> None:
        if self.signals.count and not has_failures(self.spec.log_dir):
            # A signal to the whole process tree makes torchrun close its workers: that is no failure of theirs.
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = time.monotonic() if self._is_failing() else None
        elif time.monotonic() - self._failing_since > self.spec.failing_s and not self.killed_hanging:
            # The workers alone: torchrun then writes its report, which names the rank that failed first.
            self.killed_hanging = True
            for worker in _descendants(self.process):
                _signal(worker, signal.SIGKILL)

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


def _end_with_parent(parent: int) -> None:
    """Runs in torchrun's process before it starts: the kernel ends it with mgraph, however that ends.

    Workers watch the launcher themselves, but only once they run; torchrun takes along those that do not yet.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(1)


def kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End torchrun and all that it started: SIGTERM, after five seconds SIGKILL. Does nothing where none is left."""
    victims = _marked(mark)
    if process.poll() is None:  # else its pid may be another's by now
        victims += [*_descendants(process), psutil.Process(process.pid)]
    for victim in victims:
        _signal(victim, signal.SIGTERM)
    _, alive = psutil.wait_procs(victims, timeout=TERMINATE_S)
    for victim in {*alive, *_marked(mark)}:
        _signal(victim, signal.SIGKILL)
    process.wait()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _marked(mark: str) -> list[psutil.Process]:
    """Processes of this launch wherever they hang in the tree: workers whose torchrun died belong to init."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if candidate.environ().get(_MARK) == mark:
                found.append(candidate)
        except (psutil.Error, OSError):
            continue  # another user's, or gone by now: not ours
    return found


def _signal(victim: psutil.Process, number: int) -> None:
    try:
        victim.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended first, as it should


def interrupted(what: str, way_on: str) -> MgraphError:
    """The error (exit 130) of a command that a signal ended."""
    return MgraphError(f"{what} was interrupted; {way_on}", EXIT_INTERRUPTED)
