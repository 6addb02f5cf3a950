"""The plans of a validation, run by workers; a plan that fails is left out, and the workers go on without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.commands.follow import Follower
from megagraph_cli.commands.scratch import keep
from megagraph_cli.console import Bar, Screen
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.crew import Crew
from megagraph_cli.launch import Launch, interrupted, launch

MOST_RELAUNCHES = 3
"""Each costs the start of all workers; what fails more often has another reason than a plan."""


@dataclass
class Measured:
    """``lines``: one for each time that a plan was run. ``failed``: why a plan did, by its number.

    ``ended``: the failure after which workers were not started again.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[int, WorkerFailed] = field(default_factory=dict)
    ended: WorkerFailed | None = None


@dataclass(frozen=True)
class Measuring:
    """``workers`` of this host run ``plans`` as ``job`` says, a ``runtime/job.py`` ValidateJob but for what goes on."""

    worker_module: str
    job: dict[str, Any]
    plans: Sequence[Plan]
    workers: int
    folder: Path
    screen: Screen
    crew: Crew

    def all(self) -> Measured:
        """Every plan's measurements, but for the few that failed; of several hosts host 0 alone has them.

        Raises MgraphError: the workers' failure where no plan was measured (5 or theirs), a signal (130).
        """
        found = Measured()
        for attempt in range(MOST_RELAUNCHES + 1):
            results = self.folder / f"results-{attempt}.jsonl"
            try:
                self._launch(found, results, attempt)
            except WorkerFailed as error:
                if not self.crew.hosts.first:
                    raise
                self._take(found, results, error)
                if not self._goes_on(found, error, attempt):
                    return self._ended(found, error)
                # Rounds compare plans with each other: they are run again, without the one that failed.
                found.lines = [line for line in found.lines if not line["round"]]
            else:
                self._take(found, results, None)
                return self._checked(found)
        raise AssertionError("the last attempt ends or raises")

    def _take(self, found: Measured, results: Path, error: WorkerFailed | None) -> None:
        """What one launch measured; where it ended with an ``error`` the plan that was running has failed."""
        told = list(Follower(results).fresh())
        if error is not None and told and "step_s" not in told[-1]:
            number = told[-1]["plan"]
            found.failed[number] = error
            keep(self.folder)
            self.screen.warn(f"{_words(number, self.plans[number])} failed and is left out: {error.message}")
        fresh = [line for line in told if "step_s" in line]
        found.lines = [line for line in found.lines + fresh if line["plan"] not in found.failed]

    def _goes_on(self, found: Measured, error: WorkerFailed, attempt: int) -> bool:
        """Whether the failure is a plan's own, others are left, and the workers may be started once more."""
        its_own = error in found.failed.values() and error.exit_code == EXIT_WORKER
        alone = self.crew.hosts.count == 1 and not self.crew.stops
        return its_own and alone and attempt < MOST_RELAUNCHES and len(found.failed) < len(self.plans)

    def _ended(self, found: Measured, error: WorkerFailed) -> Measured:
        if not found.lines:
            raise error
        if error not in found.failed.values():
            keep(self.folder)
            self.screen.warn(error.message)
        found.ended = error
        return found

    def _checked(self, found: Measured) -> Measured:
        numbers = {line["plan"] for line in found.lines} | found.failed.keys()
        if self.crew.hosts.first and numbers != set(range(len(self.plans))):
            raise MgraphError(f"the workers ended before every plan was run; see {self.folder}", EXIT_WORKER)
        return found

    def _launch(self, found: Measured, results: Path, attempt: int) -> None:
        known = {line["plan"]: line["step_s"] for line in found.lines}
        job = self.job | {"results": str(results), "known": known, "left_out": sorted(found.failed)}
        job_path = self.folder / "job.json"
        job_path.write_text(json.dumps(job, indent=2), encoding="utf-8")
        left = len(self.plans) - len(known) - len(found.failed)
        again = min(job["best_again"] + 1, len(self.plans) - len(found.failed)) * job["rounds"]
        follower, seen = Follower(results), [0]
        with self.screen.bar(f"starting {self.workers} {job['device']} workers", left + again) as bar:
            outcome = launch(
                Launch(
                    worker_module=self.worker_module,
                    job_path=job_path,
                    num_workers=self.workers,
                    log_dir=self.folder / f"logs-{attempt}",  # of its own: a warning has named those of the last one
                    threads=job["threads"],
                    on_poll=lambda: _show(follower, seen, bar),
                    crew=self.crew,
                )
            )
        if outcome.interrupted:
            raise interrupted("validate", "nothing was written; run it again")


def _show(follower: Follower, seen: list[int], bar: Bar) -> None:
    for line in follower.fresh():
        if "step_s" in line:
            seen[0] += 1
            bar.at(seen[0], f"plan {line['plan']}: {1e3 * line['step_s']:.1f} ms a step")


def _words(number: int, plan: Plan) -> str:
    """A plan for people: which it is, and its order."""
    dims = plan.dims
    order = (
        f"pp={dims.pp} dp={dims.dp} cp={dims.cp}, layers {','.join(map(str, plan.layers_per_stage))}, "
        f"{plan.num_microbatches} micro-batches, {plan.schedule}, recompute {plan.recompute}, {plan.context}"
    )
    return f"{f'plan {number}' if number else 'the plan that the search puts first'} ({order})"
