"""``mgraph profile``: measure this machine for one workload in a real process group."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.artifacts.workload import Recipe, Workload
from megagraph_cli.commands.devices import ALONE, Device, check_workers, check_writable, choose_device, count_workers
from megagraph_cli.commands.follow import Follower
from megagraph_cli.commands.scratch import scratch
from megagraph_cli.commands.workloads import SAME_FILES, Folders, prepare, require_trainable, workload_of
from megagraph_cli.console import Bar, Screen
from megagraph_cli.graph.graph import Graph
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.hosts.crew import Crew, joined
from megagraph_cli.launch import Launch, interrupted, launch
from megagraph_cli.machine import threads_per_worker

WORKER = "megagraph_cli.runtime.profile"
SCRATCH = "mgraph-profile-"


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure. ``gpus`` None: all cuda devices, or 2 cpu workers; ``device``: auto, cpu or cuda."""

    recipe: Recipe
    folders: Folders
    device: str = "auto"
    gpus: int | None = None
    quick: bool = False
    budget_s: float | None = None
    hosts: Hosts = ALONE
    worker: str = WORKER


def run(request: ProfileRequest, out: Path, screen: Screen) -> Profile:
    """Prepare the graph, measure with the workers that train uses, write ``out`` and return what it holds.

    Raises MgraphError: bad data or usage (2), a worker that failed (5, its logs kept), a signal (130).
    """
    if request.hosts.first:
        check_writable(out)
    with joined(request.hosts, "profile") as crew:
        crew.agree_on_flags([request.quick, request.budget_s])
        task = crew.from_first("task", lambda: _task(request))
        recipe, device, num_workers = Recipe.model_validate(task["recipe"]), task["device"], task["workers"]
        here = check_workers(device, num_workers, crew.hosts)
        graph, split = prepare(recipe.dataset, request.folders, screen)
        require_trainable(recipe, graph, split)
        crew.agree(f"prepared graph of {recipe.dataset.name}", graph.digest, SAME_FILES)
        with scratch(SCRATCH) as folder:
            _measure(request, workload_of(recipe, graph, split), graph, device, here, folder, screen, crew)
            told = crew.from_first("profile", lambda: _saved(folder, out))
            return Profile.model_validate(told)


def _task(request: ProfileRequest) -> dict[str, Any]:
    """What host 0 decides for all."""
    device = choose_device(request.device)
    workers = count_workers(device, request.gpus, request.hosts)
    return {"recipe": request.recipe.model_dump(mode="json"), "device": device, "workers": workers}


def _saved(folder: Path, out: Path) -> dict[str, Any]:
    return Profile.load(folder / "profile.json").save(out).model_dump(mode="json", by_alias=True)


def _measure(
    request: ProfileRequest,
    workload: Workload,
    graph: Graph,
    device: Device,
    num_workers: int,
    folder: Path,
    screen: Screen,
    crew: Crew,
) -> None:
    """Have ``num_workers`` workers here, and as many on every other host, write the profile into host 0's folder."""
    # As many on every host: a plan carries one number, and each host's workers start with that.
    threads = min(crew.exchange("threads", threads_per_worker(num_workers)))
    job = {
        "workload": workload.model_dump(mode="json", by_alias=True),
        "graph_path": str(graph.path),
        "device": device,
        "quick": request.quick,
        "budget_s": request.budget_s,
        "launched_s": time.time(),
        "out": str(folder / "profile.json"),
        "progress_file": str(folder / "progress.jsonl"),
        "hosts": crew.hosts.count,
        "threads": threads,
        "launcher_pid": os.getpid(),
    }
    job_path = folder / "job.json"
    job_path.write_text(json.dumps(job, indent=2), encoding="utf-8")
    progress = Follower(folder / "progress.jsonl")
    with screen.bar(f"starting {num_workers} {device} workers") as bar:
        outcome = launch(
            Launch(
                worker_module=request.worker,
                job_path=job_path,
                num_workers=num_workers,
                log_dir=folder / "logs",
                threads=threads,
                on_poll=lambda: _show(progress, bar),
                crew=crew,
            )
        )
    if outcome.interrupted:
        raise interrupted("profile", "nothing was written; run it again")


def _show(progress: Follower, bar: Bar) -> None:
    for line in progress.fresh():
        bar.at(line["done"], f"measuring {line['what']}", line["total"], line.get("left_s"))


def summary(profile: Profile, out: Path) -> dict[str, object]:
    """The fields of ``mgraph profile --json``."""
    return {
        "out": str(out),
        "dataset": profile.workload.dataset.name,
        "machine": profile.machine.model_dump(mode="json"),
        "compute": len(profile.compute),
        "comm": len(profile.comm),
        "host": len(profile.host),
        "digest": profile.digest,
    }
