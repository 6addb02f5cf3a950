"""``mgraph train``: carry out a plan with torchrun workers and say what became of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.run import Failure, Run
from megagraph_cli.artifacts.workload import GraphInfo
from megagraph_cli.commands import orders, rundir
from megagraph_cli.commands.follow import Follower
from megagraph_cli.commands.orders import CheckedRequest, TrainRequest
from megagraph_cli.commands.workloads import graph_info, prepare, require_trainable
from megagraph_cli.console import Bar, Screen
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.launch import Launch, free_port, interrupted, launch, torchrun_command
from megagraph_cli.layout.batches import steps_per_epoch
from megagraph_cli.machine import threads_per_worker

__all__ = ["TrainRequest", "command_line", "run"]


def run(request: TrainRequest, screen: Screen) -> tuple[Run, Path]:
    """Train; gives what run.json holds and the run directory.

    Raises MgraphError: bad input (2), plan, dataset or device that do not agree (4), a worker that failed (5, with
    run.json saying which and why), a signal (130, with a checkpoint).
    """
    order = orders.check(request)
    dataset = order.plan.workload.dataset
    graph, split = prepare(dataset, request.folders, screen)
    require_trainable(order.plan.workload.recipe(), graph, split)
    orders.check_graph(order.plan.workload, graph, order.source, force=request.force)
    run_dir = rundir.make(request.run_dir, request.resume, dataset.name)
    steps = steps_per_epoch(int(split.train.size), order.plan.workload.batch.batch_size)
    with rundir.held(run_dir):
        rundir.put_plan(run_dir, order.plan, order.source, changed=order.changed)
        job = _job(request, order, graph.path, graph_info(graph, split), run_dir)
        _train(request, order, job, steps * order.plan.workload.train.epochs, screen)
        return _result(run_dir), run_dir


def command_line(request: TrainRequest) -> list[str]:
    """The torchrun command that ``run`` would start (``--dry-run``): checks the plan, writes nothing."""
    order = orders.check(request)
    run_dir = rundir.planned(request.run_dir, request.resume, order.plan.workload.dataset.name)
    return torchrun_command(request.worker, run_dir / rundir.JOB, order.plan.gpus, free_port())


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
        "threads": threads_per_worker(order.plan.gpus),
        "launcher_pid": os.getpid(),
        "overrides": order.overrides,
        "trace": None if request.trace is None else str(request.trace.absolute()),
    }


def _train(request: TrainRequest, order: CheckedRequest, job: dict[str, Any], total_steps: int, screen: Screen) -> None:
    """Launch; once more from the last checkpoint after failures that may pass. run.json tells how it ended."""
    run_dir = Path(job["run_dir"])
    restarts: list[Failure] = []
    while True:
        again = {"resume": True, "restarts": [each.model_dump(mode="json") for each in restarts]} if restarts else {}
        job_path = rundir.put_job(run_dir, job | again)
        try:
            outcome_told = _launch(request, order, job_path, total_steps, screen)
            break
        except WorkerFailed as error:
            if len(restarts) == request.max_restarts or not error.may_pass:
                rundir.record(run_dir, order.plan, error.failure, restarts)
                raise
            restarts.append(error.failure)
            screen.warn(
                f"{error.message}; going on from step {rundir.last_step(run_dir)} "
                f"(restart {len(restarts)} of {request.max_restarts})"
            )
    if not outcome_told:
        rundir.record(run_dir, order.plan, None, restarts)


def _launch(request: TrainRequest, order: CheckedRequest, job_path: Path, total_steps: int, screen: Screen) -> bool:
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
            num_workers=plan.gpus,
            log_dir=run_dir / "logs",
            stop_file=run_dir / rundir.STOP,
            place_of=lambda rank: dims.place(rank, plan.mesh_order),
            on_poll=lambda: _show_progress(metrics, bar),
        )
        try:
            outcome = launch(spec)
        finally:
            (run_dir / rundir.STOP).unlink(missing_ok=True)
    if rundir.stamp(run_dir) != before:
        return True
    if not outcome.interrupted:
        raise MgraphError(f"the workers ended without a {rundir.RUN}; see {run_dir / 'logs'}", EXIT_WORKER)
    return False


def _show_progress(metrics: Follower, bar: Bar) -> None:
    for line in metrics.fresh():
        bar.at(line["step"], f"epoch {line['epoch']} step {line['step']} loss {line['loss']:.4f}")


def _result(run_dir: Path) -> Run:
    result = Run.load(run_dir / rundir.RUN)
    if result.status == "interrupted":
        raise interrupted("training", f"go on with mgraph train --resume {run_dir}")
    if result.status == "failed":
        said = result.failure.message if result.failure else f"see {run_dir / 'logs'}"
        raise MgraphError(f"training failed: {said}", EXIT_WORKER)
    return result
