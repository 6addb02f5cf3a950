"""A worker's start and end: logs, watchdog, process group, failure report. Environment variables are read here."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.layout.dims import Place
from megagraph_cli.parallel.mesh import COLLECTIVE_DEADLINE
from megagraph_cli.runtime.heap import keep_freed_memory

_WATCH_S = 1.0


@dataclass
class Worker:
    """One torchrun worker: its ranks, its device, and (once known) its place in the mesh."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    log_dir: Path
    place: Place | None = None


def run_worker(main: Callable[[Worker, dict[str, Any]], None]) -> None:
    """Run ``main(worker, job)`` as a worker process; ``sys.argv[1]`` is the job file.

    An exception is written to ``failure-rank-N.json`` in the log folder, where the launcher finds it.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    log_dir = Path(os.environ["MGRAPH_LOG_DIR"])
    _redirect_output(log_dir / f"rank-{rank}.log")
    _watch_launcher(int(job["launcher_pid"]))
    # Signals are the launcher's to handle, also those sent to the whole process tree: it asks for a stop by file.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory(os.environ)
    torch.set_num_threads(int(job["threads"]))
    worker = Worker(
        rank=rank,
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=_device(job["device"], int(os.environ["LOCAL_RANK"])),
        log_dir=log_dir,
    )
    try:
        _join(worker)
        main(worker, job)
    except BaseException as error:
        _report_failure(worker, error)
        # No orderly shutdown: the other ranks may be stuck in a collective, and leaving at once is what frees them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def _device(kind: str, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def _join(worker: Worker) -> None:
    """Join the process group; every collective has a deadline."""
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
        dist.init_process_group("nccl", timeout=COLLECTIVE_DEADLINE, device_id=worker.device)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_DEADLINE)


def _redirect_output(path: Path) -> None:
    """Everything this process and its libraries print goes to its own log file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _watch_launcher(launcher_pid: int) -> None:
    """End this process when the launcher is gone, so that a killed launcher leaves no orphans."""
    launcher = psutil.Process(launcher_pid)

    def watch() -> None:
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_S)
        os._exit(EXIT_WORKER)

    def watch_until_gone() -> None:
        try:
            watch()
        except psutil.NoSuchProcess:
            os._exit(EXIT_WORKER)

    threading.Thread(target=watch_until_gone, name="launcher-watch", daemon=True).start()


def _report_failure(worker: Worker, error: BaseException) -> None:
    traceback.print_exception(error)
    cause: BaseException = error
    # The user wants the error that started it all, whatever wrapped it.
    while cause.__cause__ is not None and not isinstance(cause, MgraphError):
        cause = cause.__cause__
    place = worker.place
    report: dict[str, Any] = {
        "rank": worker.rank,
        "pp": place.pp if place else None,
        "dp": place.dp if place else None,
        "cp": place.cp if place else None,
        "exception": type(cause).__name__,
        "message": cause.message if isinstance(cause, MgraphError) else str(cause),
        "time": time.time(),
        "collective": _echoes_another_rank(cause),
        "exit_code": cause.exit_code if isinstance(cause, MgraphError) else None,
        "details": cause.details if isinstance(cause, MgraphError) else {},
    }
    path = worker.log_dir / f"failure-rank-{worker.rank}.json"
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(report), encoding="utf-8")
    aside.rename(path)


def _echoes_another_rank(error: BaseException) -> bool:
    """True when a collective failed because the process at its other end is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "gloo/transport",
        "Timed out waiting",
    )
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
