"""The run directory of ``mgraph train``: made without overwriting anything, and run.json when workers could not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megagraph_cli.artifacts.base import read_json, reference_to, write_text
from megagraph_cli.artifacts.plan import BriefForecast, Plan
from megagraph_cli.artifacts.run import EpochRecord, Failure, Measured, Run
from megagraph_cli.errors import MgraphError

RUNS = Path("runs")
JOB, PLAN, RUN, STOP, METRICS = "job.json", "plan.json", "run.json", "stop", "metrics.jsonl"


def slug(dataset: str) -> str:
    """A dataset's name as part of a folder's name: ``/data/my graph.npz`` is ``my-graph``."""
    stem = "synthetic" if dataset.startswith("synthetic:") else Path(dataset).stem
    return re.sub(r"[^A-Za-z0-9_.]+", "-", stem).strip("-.") or "run"


def planned(asked: Path | None, resume: Path | None, dataset: str) -> Path:
    """The directory that ``make`` would give now; creates nothing.

    Raises MgraphError (exit 2) when it exists with something in it, or when there is nothing to resume.
    """
    if resume is not None:
        if asked is not None and asked.resolve() != resume.resolve():
            raise MgraphError("--resume goes on in its own directory; leave --run-dir out")
        for name in (PLAN, JOB):
            if not (resume / name).is_file():
                raise MgraphError(f"{resume} is no run directory (it has no {name}); name one that mgraph train made")
        return resume
    if asked is not None:
        if asked.exists() and (not asked.is_dir() or any(asked.iterdir())):
            raise MgraphError(f"{asked} exists and is not empty; name another with --run-dir, or --resume {asked}")
        return asked
    number = 1
    while (RUNS / f"{slug(dataset)}-{number}").exists():
        number += 1
    return RUNS / f"{slug(dataset)}-{number}"


def make(asked: Path | None, resume: Path | None, dataset: str) -> Path:
    """The run directory with ``logs`` and ``checkpoints``. Raises MgraphError (exit 2), as ``planned``."""
    run_dir = planned(asked, resume, dataset)
    try:
        while not _made(run_dir, exist_ok=asked is not None or resume is not None):
            run_dir = planned(asked, resume, dataset)
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise MgraphError(
            f"{run_dir} cannot be made ({error.strerror}); give a writable place with --run-dir"
        ) from error
    return run_dir


def make_part(run_dir: Path, host: int) -> Path:
    """The folder of another host than 0 for this run: its logs, and what it needs of host 0's files while it runs."""
    part = run_dir / f"host-{host}"
    try:
        for name in ("logs", "checkpoints"):
            (part / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MgraphError(
            f"{part} cannot be made ({error.strerror}); give a place that is writable on every host with --run-dir"
        ) from error
    return part


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep other trainings out of a run directory. Raises MgraphError (exit 2) where one is under way."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (run_dir / STOP).unlink(missing_ok=True)
        yield
    except BlockingIOError as error:
        raise MgraphError(
            f"another mgraph is training in {run_dir}; wait until it ends, or name another directory with --run-dir"
        ) from error
    finally:
        os.close(descriptor)


def _made(run_dir: Path, *, exist_ok: bool) -> bool:
    # Another mgraph may take the same number in between: whoever creates the folder has it.
    try:
        run_dir.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok or not run_dir.exists():
            raise
        return False
    return True


def put_plan(run_dir: Path, plan: Plan, source: Path, *, changed: bool) -> None:
    """plan.json: the given file as it is, or the changed plan with a digest of its own."""
    if changed:
        plan.save(run_dir / PLAN, Run.WAY_OUT)
    elif source.resolve() != (run_dir / PLAN).resolve():
        shutil.copyfile(source, run_dir / PLAN)


def metric(run_dir: Path) -> str:
    """What the scores of a run are: ``accuracy`` or ``roc_auc``."""
    return Plan.load(run_dir / PLAN, force=True).workload.dataset.metric


def put_job(run_dir: Path, job: Mapping[str, Any]) -> Path:
    """job.json, the workers' one argument."""
    path = run_dir / JOB
    write_text(path, json.dumps(job, indent=2, sort_keys=True) + "\n", Run.WAY_OUT)
    return path


def overrides_of(run_dir: Path) -> dict[str, Any]:
    """What the recipe of an earlier run was changed by: ``{"train.key": value}``."""
    path = run_dir / JOB
    if not path.exists():
        return {}
    job = read_json(path, "mgraph train")
    overrides = job.get("overrides", {}) if isinstance(job, dict) else None
    if not isinstance(overrides, dict):
        raise MgraphError(f"{path} is no job of mgraph train; start a new run")
    return overrides


def stamp(run_dir: Path) -> tuple[int, int] | None:
    """Tells one run.json from the next: its inode and time of change, None where there is none."""
    path = run_dir / RUN
    if not path.exists():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def last_step(run_dir: Path) -> int:
    """The optimizer step of the newest whole checkpoint, 0 where there is none."""
    steps = [int(folder.name.removeprefix("step-")) for folder in (run_dir / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def record(run_dir: Path, plan: Plan, failure: Failure | None, restarts: Sequence[Failure] = ()) -> Run:
    """run.json for workers that could not write their own: failed with ``failure``, else interrupted.

    Keeps the whole epochs that the newest checkpoint tells of, else an earlier run.json of this directory; nothing
    of this launch was measured.
    """
    epochs, best_epoch = _whole_epochs(run_dir)
    forecast = plan.predicted
    predicted = None
    if forecast is not None:
        predicted = BriefForecast(step_s=forecast.step_s, peak_bytes=forecast.peak_bytes)
    copied = run_dir / PLAN
    run = Run(
        inputs=[reference_to(copied)] if copied.exists() else [],
        status="failed" if failure else "interrupted",
        rng_seed=plan.workload.train.rng_seed,
        epochs=epochs,
        best_epoch=best_epoch,
        test_score=None,
        data_stall_s=None,
        ranks=[],
        predicted=predicted,
        measured=Measured(step_s=None, peak_bytes=None),
        failure=failure,
        restarts=list(restarts),
    )
    return run.save(run_dir / RUN)


def _whole_epochs(run_dir: Path) -> tuple[list[EpochRecord], int | None]:
    """Epochs and best epoch as far as this directory knows; damaged files are passed over.

    This serves a failure that is already being reported: what cannot be read here must not take its place.
    """
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*"))
    if checkpoints:
        try:
            state = json.loads((checkpoints[-1] / "state.json").read_text(encoding="utf-8"))
            return [EpochRecord.model_validate(epoch) for epoch in state["epochs"]], state["best_epoch"]
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            pass
    try:
        earlier = Run.load(run_dir / RUN, force=True)
    except MgraphError:
        return [], None
    return earlier.epochs, earlier.best_epoch
