"""The job files that the commands hand to workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megagraph_cli.artifacts.run import Failure
from megagraph_cli.artifacts.workload import GraphInfo, Workload


class Job(BaseModel):
    """What every worker is told. ``threads`` per worker; ``launcher_pid`` the process whose end ends the workers.

    Paths are those of its host; of several ``hosts``, each with equally many workers, host 0 keeps what is written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    graph_path: Path
    device: Literal["cpu", "cuda"]
    threads: int
    launcher_pid: int
    hosts: int = 1


class TrainJob(Job):
    """``mgraph train``. ``epochs`` and ``max_steps`` bound the run; ``stop_file`` asks it to stop when it appears.

    The timeline of a few steps goes to ``trace``. ``restarts``: the failures after which it goes on here.
    """

    plan: Path
    run_dir: Path
    graph: GraphInfo
    epochs: int | None
    max_steps: int | None
    resume: bool
    stop_file: Path
    overrides: dict[str, Any] = {}
    trace: Path | None = None
    restarts: list[Failure] = []


class ProfileJob(Job):
    """``mgraph profile``. The profile is written to ``out``, a line per measurement to ``progress_file``.

    ``launched_s``: when the workers were launched, in seconds since the epoch. ``budget_s``: how long it may take from
    then on; None: as long as is usual, and longer where the least that must be measured takes longer.
    """

    workload: Workload
    quick: bool
    launched_s: float
    budget_s: float | None = None
    out: Path
    progress_file: Path


class ValidateJob(Job):
    """``mgraph validate``: plan files, the search's pick first, each run for ``steps`` steps.

    The pick and the ``best_again`` best others are measured again in ``rounds`` rounds. Two lines for every measurement
    go to ``results``, as it begins and when it is done; what runs leave behind to ``work_dir``. ``known``: seconds of a
    step of plans that were measured before, by number; plans ``left_out`` are not run.
    """

    plans: list[Path]
    graph: GraphInfo
    steps: int
    rounds: int
    best_again: int
    results: Path
    work_dir: Path
    known: dict[int, float] = {}
    left_out: list[int] = []
