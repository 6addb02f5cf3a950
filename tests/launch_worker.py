"""A worker for tests/test_launch.py: does what its job file says; stands in for megagraph_cli.runtime."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def fail(rank: int, exception: str, message: str, **fields: object) -> None:
    failure = {
        "rank": rank,
        "pp": rank,
        "dp": 0,
        "cp": 0,
        "exception": exception,
        "message": message,
        "time": time.time(),
        "collective": False,
        "details": {},
    }
    log_dir = Path(os.environ["MGRAPH_LOG_DIR"])
    (log_dir / f"rank-{rank}.log").write_text(message)
    (log_dir / f"failure-rank-{rank}.json").write_text(json.dumps(failure | fields))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, what = int(os.environ["RANK"]), job["what"]
    folder = Path(job["folder"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    (folder / f"threads-{rank}").write_text(os.environ["OMP_NUM_THREADS"])
    if what == "succeed":
        return
    if what == "raise" and rank == 1:
        fail(1, "ValueError", "the second rank is broken\nand a second line", exit_code=job.get("exit_code"))
        sys.exit(1)
    if what == "echo":
        # Rank 0 fails first but only because it lost its peer; rank 1 has the cause.
        if rank == 0:
            fail(0, "RuntimeError", "connection closed by peer", collective=True)
            wait_for(folder.parent / "logs" / "failure-rank-1.json")  # torchrun would end rank 1 before it told
            sys.exit(1)
        wait_for(folder.parent / "logs" / "failure-rank-0.json")
        fail(1, "ValueError", "the cause")
        sys.exit(1)
    if what == "exit" and rank == 1:
        os._exit(7)
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            wait_for(folder / "pid-0")
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if what == "steady":  # as megagraph_cli.runtime: signals are the launcher's to handle
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (folder / f"steady-{rank}").touch()
    stop = Path(job["stop_file"])
    while not stop.exists():
        time.sleep(0.02)
    if what == "steady":
        time.sleep(1.0)  # the rest of its step
    (folder / f"stopped-{rank}").touch()


main()
