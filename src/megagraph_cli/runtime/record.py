"""What a run leaves behind: metrics.jsonl while it goes on, run.json when it ends."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.plan import BriefForecast, Plan
from megagraph_cli.artifacts.run import Failure, Measured, RankRecord, Run
from megagraph_cli.errors import MgraphError
from megagraph_cli.layout.dims import Place
from megagraph_cli.runtime.checkpoint import TrainState

_UNTIMED_STEPS = 3
"""The first steps warm up and are metered; the median is over the steps after them."""


class MetricsFile:
    """One JSON line per optimizer step, flushed as it is written; floats at full precision."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def cut_back(self, step: int) -> None:
        """Drop the lines of steps after ``step``, which a resumed run takes again, and a half-written last line."""
        if not self.path.exists():
            return
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        aside = self.path.with_name(f".{self.path.name}.part")
        aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        aside.replace(self.path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


@dataclass
class RankMeter:
    """One rank's own measurements: seconds of each step of this process, peak bytes, loader stall."""

    rank: int
    place: Place
    step_s: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    peak_bytes: int | None = None
    memory: dict[str, int] | None = None

    def saw_peak(self, peak_bytes: int, memory: dict[str, int] | None = None) -> None:
        """A step's peak and, where they were metered, its bytes by category: the largest is kept of both."""
        if self.peak_bytes is None or peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes
            self.memory = memory or self.memory

    def record(self) -> RankRecord:
        timed = self.step_s[_UNTIMED_STEPS:]
        return RankRecord(
            rank=self.rank,
            pp=self.place.pp,
            dp=self.place.dp,
            cp=self.place.cp,
            peak_bytes=self.peak_bytes,
            step_s=statistics.median(timed) if timed else None,
            memory=self.memory,
        )


def write_run(
    run_dir: Path,
    plan: Plan,
    status: Literal["completed", "interrupted"],
    state: TrainState,
    meter: RankMeter,
    test_score: float | None,
    restarts: Sequence[Failure] = (),
) -> None:
    """Gather every rank's measurements and write run.json; all ranks call it, rank 0 writes.

    ``data_stall_s`` is that of the rank that waited longest.
    """
    found: list[tuple[RankRecord, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (meter.record(), meter.stall_s))
    if meter.rank:
        return
    ranks = [each[0] for each in found if each is not None]
    stall_s = max(each[1] for each in found if each is not None)
    steps = [record.step_s for record in ranks if record.step_s is not None]
    peaks = [record.peak_bytes for record in ranks if record.peak_bytes is not None]
    predicted = plan.predicted
    run = Run(
        inputs=[reference_to(run_dir / "plan.json")],
        status=status,
        rng_seed=plan.workload.train.rng_seed,
        epochs=state.epochs,
        best_epoch=state.best_epoch,
        test_score=test_score,
        data_stall_s=stall_s / len(meter.step_s) if meter.step_s else None,
        ranks=ranks,
        predicted=BriefForecast(step_s=predicted.step_s, peak_bytes=predicted.peak_bytes) if predicted else None,
        measured=Measured(step_s=max(steps) if steps else None, peak_bytes=max(peaks) if peaks else None),
        restarts=list(restarts),
    )
    if not meter.step_s:
        run = _with_earlier_measurements(run, run_dir)
    run.save(run_dir / "run.json")


def _with_earlier_measurements(run: Run, run_dir: Path) -> Run:
    """A launch that found no step left to take measured nothing: what one before it measured of this plan stands."""
    try:
        earlier = Run.load(run_dir / "run.json", force=True)
    except MgraphError:  # there is none, or it is damaged
        return run
    if earlier.inputs != run.inputs:
        return run
    kept = {"ranks": earlier.ranks, "measured": earlier.measured, "data_stall_s": earlier.data_stall_s}
    return run.model_copy(update=kept)
