"""``mgraph train``: carry out a plan with torchrun workers and say what became of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.run import Failure, Run
from megagraph_cli.artifacts.workload import GraphInfo
from megagraph_cli.commands import orders, rundir
from megagraph_cli.commands.devices import check_workers, worker_threads
from megagraph_cli.commands.follow import Follower
from megagraph_cli.commands.orders import CheckedRequest, TrainRequest
from megagraph_cli.commands.workloads import SAME_FILES, graph_info, prepare, require_trainable
from megagraph_cli.console import Bar, Screen
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.crew import Crew, joined
from megagraph_cli.launch import Launch, interrupted, launch, on_free_port, torchrun_command
from megagraph_cli.layout.batches import steps_per_epoch

__all__ = ["TrainRequest", "command_line", "run"]


def run(request: TrainRequest, screen: Screen) -> tuple[Run, Path]:
    """Train; gives what run.json holds and the run directory.

    Raises MgraphError: bad input (2), plan, dataset or device that do not agree (4), a worker that failed (5, with
    run.json saying which and why), a signal (130, with a checkpoint).
    """
    orders.check_restarts(request)
    with joined(request.hosts, "train") as crew:
        crew.agree_on_flags([request.max_steps, str(request.resume), str(request.trace)])
        order = _order(request, crew)
        for warning in order.warnings:
            screen.warn(warning)
        _warn_of_links(order, crew, screen)
        dataset = order.plan.workload.dataset
        graph, split = prepare(dataset, request.folders, screen)
        require_trainable(order.plan.workload.recipe(), graph, split)
        orders.check_graph(order.plan.workload, graph, order.source, force=request.force)
        crew.agree(f"prepared graph of {dataset.name}", graph.digest, SAME_FILES)
        run_dir = _run_dir(request, crew, dataset.name)
        steps = steps_per_epoch(int(split.train.size), order.plan.workload.batch.batch_size)
        with rundir.held(run_dir):
            rundir.put_plan(run_dir, order.plan, order.source, changed=order.changed)
            threads = worker_threads(order.plan, crew.hosts.share(order.plan.gpus), order.source, screen)
            job = _job(request, order, graph.path, graph_info(graph, split), run_dir) | {"threads": threads}
            _train(request, order, job, steps * order.plan.workload.train.epochs, screen, crew)
            return _result(run_dir, crew), run_dir


def _order(request: TrainRequest, crew: Crew) -> CheckedRequest:
    """Host 0's checked request: a plan, and a run to go on with, are needed there alone."""
    mine = orders.check(request) if crew.hosts.first else None
    told = crew.exchange("order", None if mine is None or crew.hosts.count == 1 else mine.told())[0]
    order = mine or CheckedRequest.heard(told)
    check_workers(order.device, order.plan.gpus, crew.hosts)
    return order


def _warn_of_links(order: CheckedRequest, crew: Crew, screen: Screen) -> None:
    if crew.hosts.first and order.plan.predicted is not None and order.plan.hosts < crew.hosts.count:
        screen.warn(
            f"{order.source} was made for one host: its forecast knows nothing of the link between {crew.hosts.count}"
        )


def _run_dir(request: TrainRequest, crew: Crew, dataset: str) -> Path:
    """The run directory, made by host 0; on every other host a folder of its own in one of the same name."""
    named = crew.from_first("run directory", lambda: str(rundir.make(request.run_dir, request.resume, dataset)))
    return Path(named) if crew.hosts.first else rundir.make_part(Path(named), crew.hosts.rank)


def command_line(request: TrainRequest) -> list[str]:
    """The torchrun command that ``run`` would start (``--dry-run``): checks the plan, writes nothing."""
    order = orders.check(request)
    run_dir = rundir.planned(request.run_dir, request.resume, order.plan.workload.dataset.name)
    workers = request.hosts.share(order.plan.gpus)
    return torchrun_command(request.worker, run_dir / rundir.JOB, workers, on_free_port(request.hosts))


def _job(
    request: TrainRequest, order: CheckedRequest, graph_path: Path, graph: GraphInfo, run_dir: Path
) -> dict[str, Any]:
    return {
        "plan": str(run_dir / rundir.PLAN),
        "run_dir": str(run_dir),
        "graph_path": str(graph_path),
        "graph": graph.model_dump(mode="json"),
        "device": order.device,
        "epochs": order.plan.workload.train.epochs,
        "max_steps": request.max_steps,
        "resume": request.resume is not None,
        "stop_file": str(run_dir / rundir.STOP),
        "hosts": request.hosts.count,
        "launcher_pid": os.getpid(),
        "overrides": order.overrides,
        "trace": None if request.trace is None else str(request.trace.absolute()),
    }


def _train(
    request: TrainRequest, order: CheckedRequest, job: dict[str, Any], total_steps: int, screen: Screen, crew: Crew
) -> None:
    """Launch; once more from the last checkpoint after failures that may pass. run.json tells how it ended."""
    run_dir = Path(job["run_dir"])
    restarts: list[Failure] = []
    while True:
        again = {"resume": True, "restarts": [each.model_dump(mode="json") for each in restarts]} if restarts else {}
        job_path = rundir.put_job(run_dir, job | again)
        try:
            outcome_told = _launch(request, order, job_path, job["threads"], total_steps, screen, crew)
            break
        except WorkerFailed as error:
            if crew.stops or len(restarts) == request.max_restarts or not error.may_pass:
                if crew.hosts.first:
                    rundir.record(run_dir, order.plan, error.failure, restarts)
                raise
            restarts.append(error.failure)
            screen.warn(
                f"{error.message}; going on from step {rundir.last_step(run_dir)} "
                f"(restart {len(restarts)} of {request.max_restarts})"
            )
    if not outcome_told:
        rundir.record(run_dir, order.plan, None, restarts)


def _launch(
    request: TrainRequest,
    order: CheckedRequest,
    job_path: Path,
    threads: int,
    total_steps: int,
    screen: Screen,
    crew: Crew,
) -> bool:
    """Start the workers and wait for them; whether they wrote run.json. They must, unless they were interrupted."""
    plan, run_dir = order.plan, job_path.parent
    dims = plan.dims.parallel()
    before = rundir.stamp(run_dir)
    metrics = Follower(run_dir / rundir.METRICS, skip_existing=True)
    total = min(total_steps, request.max_steps or total_steps)
    with screen.bar(f"starting {plan.gpus} {order.device} workers", total) as bar:
        spec = Launch(
            worker_module=request.worker,
            job_path=job_path,
            num_workers=crew.hosts.share(plan.gpus),
            log_dir=run_dir / "logs",
            stop_file=run_dir / rundir.STOP,
            threads=threads,
            place_of=lambda rank: dims.place(rank, plan.mesh_order),
            on_poll=lambda: _show_progress(metrics, bar),
            crew=crew,
        )
        try:
            outcome = launch(spec)
        finally:
            (run_dir / rundir.STOP).unlink(missing_ok=True)
    if rundir.stamp(run_dir) != before or not crew.hosts.first:
        return True
    if not outcome.interrupted:
        raise MgraphError(f"the workers ended without a {rundir.RUN}; see {run_dir / 'logs'}", EXIT_WORKER)
    return False


def _show_progress(metrics: Follower, bar: Bar) -> None:
    for line in metrics.fresh():
        bar.at(line["step"], f"epoch {line['epoch']} step {line['step']} loss {line['loss']:.4f}")


def _result(run_dir: Path, crew: Crew) -> Run:
    """What host 0's run.json holds, on every host. Raises MgraphError where it tells of no good end."""
    told = crew.from_first("result", lambda: Run.load(run_dir / rundir.RUN).model_dump(mode="json", by_alias=True))
    result = Run.model_validate(told)
    if result.status == "interrupted":
        named = run_dir if crew.hosts.first else run_dir.parent
        raise interrupted("training", f"go on with mgraph train --resume {named}")
    if result.status == "failed":
        said = result.failure.message if result.failure else f"see {run_dir / 'logs'}"
        raise MgraphError(f"training failed: {said}", EXIT_WORKER)
    return result
