"""Which rank failed first, and why: read from what workers and torchrun left in the log folder."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.run import Failure
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.layout.dims import Place

LAUNCHER_LOG = "launcher.log"
PlaceOf = Callable[[int], Place]

_REPORT = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+) \(pid: \d+\)")
# Signals that often only echo another rank's end: torchrun's own takedown, and a collective's watchdog.
_ECHOES = (signal.SIGTERM, signal.SIGABRT)
_STOPS = (signal.SIGTERM, signal.SIGINT)


class WorkerFailed(MgraphError):  # noqa: N818 (it says what happened, as the exit code does)
    """A worker failed (exit 5, or the code that the worker's own error carries); ``failure`` goes into run.json.

    ``echo``: it seems only to have lost its connection to another that failed before.
    """

    def __init__(
        self, message: str, failure: Failure, exit_code: int = EXIT_WORKER, *, echo: bool = False, **details: object
    ) -> None:
        super().__init__(message, exit_code, **details)
        self.failure = failure
        self.echo = echo

    @property
    def may_pass(self) -> bool:
        """Whether another try may do better: not where the worker said what the user has to change."""
        return self.exit_code == EXIT_WORKER and self.failure.exception != MgraphError.__name__


@dataclass(frozen=True)
class Ended:
    """How torchrun says that one rank ended: ``code`` below zero is minus the signal that killed it."""

    rank: int
    code: int


def find_failure(log_dir: Path, place_of: PlaceOf | None, *, killed_hanging: bool) -> WorkerFailed:
    """The first failed rank of a launch that ended badly.

    A rank killed by a signal comes first (the others only lost their connection to it), then the earliest error
    that is not a collective's echo, then the earliest of all. ``killed_hanging``: the launcher itself killed
    workers that did not end, so a SIGKILL elsewhere than in torchrun's root cause means nothing.
    """
    root_cause, others = _torchrun_report(log_dir)
    ended = ([root_cause] if root_cause else []) + ([] if killed_hanging else others)
    errors = sorted(_error_files(log_dir), key=lambda error: error["time"])
    killed = [each for each in ended if each.code < 0 and -each.code not in _ECHOES]
    causes = [error for error in errors if not error.get("collective")]
    if killed:
        return _killed(killed[0], log_dir, place_of)
    if causes:
        return _raised(causes[0], log_dir)
    if errors and (root_cause is None or root_cause.code > 0):
        return _raised(errors[0], log_dir)
    if ended:
        return _killed(ended[0], log_dir, place_of)
    return _errors_at_start(log_dir)


def only_signalled(log_dir: Path) -> bool:
    """Whether nothing but SIGTERM and SIGINT ended the ranks: no other end is reported, no reason of their own."""
    root_cause, others = _torchrun_report(log_dir)
    ended = ([root_cause] if root_cause else []) + others
    errors = {error["rank"]: error for error in _error_files(log_dir)}
    echoes = {rank for rank, error in errors.items() if _echoes_a_signal(error)}
    return len(echoes) == len(errors) and all(-each.code in _STOPS or each.rank in echoes for each in ended)


def _echoes_a_signal(error: dict[str, Any]) -> bool:
    return bool(error.get("collective")) or error["exception"] == "KeyboardInterrupt"


def clear_failures(log_dir: Path) -> None:
    """Forget the failures of an earlier launch with the same log folder."""
    for path in log_dir.glob("failure-rank-*.json"):
        path.unlink()


def has_failures(log_dir: Path) -> bool:
    """Whether a worker has already written why it fails."""
    return next(log_dir.glob("failure-rank-*.json"), None) is not None


def launcher_log(log_dir: Path) -> str:
    """What torchrun printed so far."""
    path = log_dir / LAUNCHER_LOG
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _torchrun_report(log_dir: Path) -> tuple[Ended | None, list[Ended]]:
    """torchrun's root cause and its other failures, from the report at the end of its log."""
    others, _, root = launcher_log(log_dir).partition("Root Cause (first observed failure)")
    roots, rest = ([Ended(int(rank), int(code)) for rank, code in _REPORT.findall(part)] for part in (root, others))
    return (roots[0] if roots else None), rest


def _error_files(log_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(log_dir.glob("failure-rank-*.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue  # its worker was killed while it wrote; torchrun's report tells of it


def _log_of(rank: int, log_dir: Path) -> Path:
    path = log_dir / f"rank-{rank}.log"
    return path if path.exists() else log_dir / LAUNCHER_LOG


def _killed(ended: Ended, log_dir: Path, place_of: PlaceOf | None) -> WorkerFailed:
    place = None if place_of is None else place_of(ended.rank)
    who = f"rank {ended.rank}" + (f" ({place})" if place else "")
    name = _signal_name(-ended.code) if ended.code < 0 else None
    if name is None:
        said = f"{who} ended with exit code {ended.code} and no reason"
    elif name == "SIGKILL":
        said = f"{who} was killed by SIGKILL; if the host ran out of memory, search with a smaller --mem"
    else:
        said = f"{who} was killed by {name}"
    message = f"{said}; its log is {_log_of(ended.rank, log_dir)}"
    axes = {} if place is None else {"pp": place.pp, "dp": place.dp, "cp": place.cp}
    echo = -ended.code in _ECHOES
    return WorkerFailed(message, _failure(ended.rank, axes, message, signal=name), echo=echo)


def _raised(error: dict[str, Any], log_dir: Path) -> WorkerFailed:
    rank = error["rank"]
    axes = {axis: error[axis] for axis in ("pp", "dp", "cp") if error.get(axis) is not None}
    place = " ".join(f"{axis}={degree}" for axis, degree in axes.items())
    first_line = (str(error["message"]).strip().splitlines() or ["no message"])[0].rstrip(".")
    exit_code = error.get("exit_code")
    log = _log_of(rank, log_dir)
    if exit_code is None:
        who = f"rank {rank}" + (f" ({place})" if place else "")
        message = f"{who} failed with {error['exception']}: {first_line}; its log is {log}"
    else:  # the worker raised a sentence for the user: it stands first
        message = f"{first_line} (rank {rank}{', ' + place if place else ''}; its log is {log})"
    failure = _failure(rank, axes, message, exception=error["exception"])
    echo = bool(error.get("collective"))
    return WorkerFailed(message, failure, exit_code or EXIT_WORKER, echo=echo, **error.get("details", {}))


def _errors_at_start(log_dir: Path) -> WorkerFailed:
    lines = launcher_log(log_dir).strip().splitlines()
    last = lines[-1].strip() if lines else "it printed nothing"
    message = f"torchrun ended before its workers did ({last}); its log is {log_dir / LAUNCHER_LOG}"
    # With several hosts it mostly lost its connection to another's torchrun.
    return WorkerFailed(message, _failure(None, {}, message), echo=True)


def _failure(
    rank: int | None, axes: dict[str, int], message: str, *, signal: str | None = None, exception: str | None = None
) -> Failure:
    return Failure(
        rank=rank,
        pp=axes.get("pp"),
        dp=axes.get("dp"),
        cp=axes.get("cp"),
        signal=signal,
        exception=exception,
        message=message,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
