"""When the workers of a validation are started again, and what is kept where they are not; no worker runs here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megagraph_cli.artifacts.run import Failure
from megagraph_cli.commands import measuring
from megagraph_cli.commands.measuring import Measured, Measuring
from megagraph_cli.console import Screen
from megagraph_cli.errors import EXIT_STALE, EXIT_WORKER
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.hosts.crew import Crew
from megagraph_cli.launch import Launch, Outcome
from tests.artifacts import examples

Lines = list[dict[str, Any]]


def begun(plan: int) -> dict[str, Any]:
    return {"plan": plan, "round": 0}


def done(plan: int) -> dict[str, Any]:
    return begun(plan) | {"step_s": 1.0, "peak_bytes": 10}


def failure(exit_code: int = EXIT_WORKER) -> WorkerFailed:
    return WorkerFailed("it broke", Failure(rank=1, pp=0, dp=0, cp=0, message="it broke"), exit_code)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Measured, list[dict[str, Any]]]]:
    """(what comes of three plans, the jobs of the launches), each of which leaves lines and may fail."""

    def run(*launches: tuple[Lines, WorkerFailed | None], hosts: Hosts | None = None) -> tuple[Measured, Lines]:
        jobs: Lines = []

        def launch(spec: Launch) -> Outcome:
            job = json.loads(spec.job_path.read_text())
            lines, error = launches[len(jobs)]
            jobs.append(job)
            Path(job["results"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
            if error is not None:
                raise error
            return Outcome()

        monkeypatch.setattr(measuring, "launch", launch)
        job = {"device": "cpu", "threads": 1, "rounds": 5, "best_again": 3}
        crew = Crew(hosts or Hosts(), {})
        made = Measuring("none", job, [examples.plan()] * 3, 2, tmp_path, Screen.stderr(), crew)
        return made.all(), jobs

    return run


def test_a_failing_plans_workers_start_again_with_what_is_known(measured: Callable[..., Any]) -> None:
    again = [done(2) | {"round": number} for number in range(1, 6)]
    found, jobs = measured(([begun(0), done(0), begun(1)], failure()), ([begun(2), done(2), *again], None))
    assert [(job["known"], job["left_out"]) for job in jobs] == [({}, []), ({"0": 1.0}, [1])]
    assert (list(found.failed), found.ended) == ([1], None)
    assert found.lines == [done(0), done(2), *again]


def test_rounds_are_run_again_without_the_plan_that_failed_in_them(measured: Callable[..., Any]) -> None:
    first = [done(0), done(1), done(2), done(0) | {"round": 1}, begun(1) | {"round": 1}]
    second = [done(0) | {"round": 1}, done(2) | {"round": 1}]
    found, jobs = measured((first, failure()), (second, None))
    assert (jobs[1]["known"], jobs[1]["left_out"]) == ({"0": 1.0, "2": 1.0}, [1])
    assert found.lines == [done(0), done(2), *second]


@pytest.mark.parametrize(
    ("lines", "exit_code", "failed", "hosts"),
    [
        ([begun(0), done(0)], EXIT_WORKER, [], Hosts()),  # between plans: no plan's fault
        ([begun(0), done(0), begun(1)], EXIT_STALE, [1], Hosts()),  # the user has to change something
        ([begun(0), done(0), begun(1)], EXIT_WORKER, [1], Hosts(2, 0)),  # the other host has ended
    ],
)
def test_what_a_new_start_would_not_mend_ends_with_what_was_measured(
    lines: Lines, exit_code: int, failed: list[int], hosts: Hosts, measured: Callable[..., Any]
) -> None:
    error = failure(exit_code)
    found, jobs = measured((lines, error), hosts=hosts)
    assert len(jobs) == 1
    assert (found.lines, list(found.failed), found.ended) == ([done(0)], failed, error)


@pytest.mark.parametrize(
    ("lines", "hosts"), [([], Hosts()), ([begun(0)], Hosts(2, 0)), ([begun(0), done(0), begun(1)], Hosts(2, 1))]
)
def test_where_nothing_was_measured_here_the_failure_is_raised(
    lines: Lines, hosts: Hosts, measured: Callable[..., Any]
) -> None:
    error = failure()
    with pytest.raises(WorkerFailed) as caught:
        measured((lines, error), hosts=hosts)
    assert caught.value is error
