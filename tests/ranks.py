"""Run a function on several ranks: real processes, real gloo; all are killed when one fails.

Ranks are forked from a server that has imported what they need and run nothing: importing it in each of them would
take longer than most tests.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE_S = 360.0
_IMPORTED = ["torch", "torch.distributed.device_mesh", "megagraph_cli.runtime.train"]


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """``function(rank, *arguments)`` on ``size`` ranks of one gloo group; returns what each rank returned.

    Raises AssertionError with the tail of every rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, function, arguments), daemon=True)
            for rank in range(size)
        ]
        started: list[Any] = []
        try:
            for process in ranks:
                process.start()
                started.append(process)
            _wait(ranks, time.monotonic() + deadline_s)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.join(30)
        failures = [path.read_text()[-2000:] for path in sorted(Path(folder).glob("failed-*"))]
        codes = [process.exitcode for process in ranks]
        assert not any(codes), f"exit codes {codes}\n" + "\n".join(failures)
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(size)]


def _wait(ranks: list[Any], deadline: float) -> None:
    """Until all ended well, one failed, or the deadline passed."""
    while any(process.exitcode is None for process in ranks):
        failed = any(process.exitcode for process in ranks)
        assert time.monotonic() < deadline, "the ranks did not end in time"
        if failed:
            time.sleep(0.5)  # the others report what they saw
            return
        time.sleep(0.02)


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        result = function(rank, *arguments)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"failed-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
