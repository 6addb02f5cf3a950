"""Which device a command works on, how many workers it may carry, and whether its output can be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.console import Screen
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.machine import cuda_devices, threads_as_measured

Device = Literal["cpu", "cuda"]
DEFAULT_CPU_WORKERS = 2
MAX_CPU_WORKERS = 64
ALONE = Hosts()


def choose_device(asked: str) -> Device:
    """``auto`` is cuda where there is a device, else cpu. Raises MgraphError (exit 2): cuda without a device."""
    if asked == "cpu":
        return "cpu"
    devices = cuda_devices()
    if asked == "cuda" and not devices:
        raise MgraphError("--device cuda: this machine has no cuda device that torch can use; pass --device cpu")
    return "cuda" if devices else "cpu"


def device_of_artifact(asked: str | None, made_for: Device, path: Path, *, force: bool) -> Device:
    """The device an artifact was made for; ``auto`` and nothing mean that one.

    Raises MgraphError (exit 4) when another is asked for; ``force`` takes the one asked for. Whether this machine has
    it is another question: a plan may be for elsewhere.
    """
    if asked in (None, "auto", made_for):
        return made_for
    if not force:
        raise MgraphError(
            f"{path} was made for {made_for}, not {asked}; run mgraph profile --device {asked}, or pass --force",
            EXIT_STALE,
        )
    return "cuda" if asked == "cuda" else "cpu"


def count_workers(device: Device, asked: int | None, hosts: Hosts = ALONE) -> int:
    """Workers for ``profile``, over all hosts: on cuda at most the devices and all by default, on a cpu 1 to 64.

    The cpu's default is 2, or one on each host. Raises MgraphError (exit 2) when more are asked for.
    """
    if asked is None and device == "cuda":
        return cuda_devices() * hosts.count
    workers = max(DEFAULT_CPU_WORKERS, hosts.count) if asked is None else asked
    check_workers(device, workers, hosts)
    return workers


def check_workers(device: Device, num_workers: int, hosts: Hosts = ALONE) -> int:
    """Workers of this host, when so many are shared by ``hosts``. Raises MgraphError (exit 2) where that cannot be."""
    here = hosts.share(num_workers)
    if device == "cpu" and num_workers > MAX_CPU_WORKERS:
        raise MgraphError(f"{num_workers} workers are more than the {MAX_CPU_WORKERS} that cpus carry; ask for fewer")
    if device == "cuda" and here > (devices := cuda_devices()):
        raise MgraphError(
            f"{here} workers need {here} cuda devices but this machine has {devices}; "
            f"ask for at most {devices * hosts.count} with --gpus, or pass --device cpu"
        )
    return here


def worker_threads(plan: Plan, local_workers: int, source: Path, screen: Screen) -> int:
    """Compute threads of each worker here: those that the plan's forecast counts on; it is said where there are fewer.

    A plan without says nothing of threads: each worker has its share of the cores.
    """
    threads = threads_as_measured(local_workers, plan.threads)
    if plan.threads is not None and threads < plan.threads:
        screen.warn(
            f"{source} counts on workers with {plan.threads} threads but here {local_workers} workers have {threads} "
            "each: steps will take longer than it foretells"
        )
    return threads


def check_writable(path: Path, flag: str = "--out") -> None:
    """That ``path`` can be written later, before minutes are spent on what goes there. Raises MgraphError (exit 2)."""
    folder = path.parent
    if path.is_dir():
        raise MgraphError(f"{path} is a folder; name a file with {flag}")
    if not folder.is_dir():
        raise MgraphError(f"{path} cannot be written: there is no folder {folder}; make it or name another with {flag}")
    if not os.access(folder, os.W_OK):
        raise MgraphError(f"{path} cannot be written (permission denied); give a writable place with {flag}")
