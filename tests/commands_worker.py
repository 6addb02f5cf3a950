"""A worker for the tests of profile and train: writes what the real ones would, or fails as the job's recipe says.

The recipe's seed chooses: 0 does well, 1 fails on rank 1, 2 waits to be stopped, 3 ends without a run.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from megagraph_cli.artifacts.plan import BriefForecast, Plan
from megagraph_cli.artifacts.profile import Machine, Profile
from megagraph_cli.artifacts.run import EpochRecord, Measured, Run
from megagraph_cli.artifacts.workload import Workload


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    if "out" in job:
        _profile(job, rank)
    elif "plans" in job:
        _validate(job, rank)
    else:
        _train(job, rank)


def _profile(job: dict, rank: int) -> None:
    workload = Workload.model_validate(job["workload"])
    if workload.train.rng_seed == 1:
        _fail(rank)
    if rank == 0:
        with Path(job["progress_file"]).open("a") as file:
            file.write(json.dumps({"done": 1, "total": 2, "what": "layer"}) + "\n")
        machine = Machine(
            hosts=1,
            device=job["device"],
            num_devices=int(os.environ["WORLD_SIZE"]),
            memory_bytes=10**9,
            overhead_bytes=10**8,
            backend="gloo",
            torch="none",
        )
        Profile(workload=workload, machine=machine, compute=[], comm=[], host=[]).save(Path(job["out"]))


def _validate(job: dict, rank: int) -> None:
    """Plans take what was predicted, the later ones by a percent more each, and a percent more bytes.

    ``FAILS_AT``: numbers of a plan and a round, as ``2.0``, at which rank 1 is said to fail.
    """
    plans = [Plan.load(Path(path)) for path in job["plans"]]
    if plans[0].workload.train.rng_seed == 1:
        _fail(rank)
    if rank:
        return
    fails = [tuple(map(int, at.split("."))) for at in os.environ.get("FAILS_AT", "").split()]
    whole = [index for index in range(len(plans)) if index not in job["left_out"]]
    once = [(0, index) for index in whole if str(index) not in job["known"]]
    again = [(number, index) for number in range(1, job["rounds"] + 1) for index in whole[: 1 + job["best_again"]]]
    with Path(job["results"]).open("a") as file:
        for number, index in [*once, *again]:
            file.write(json.dumps({"plan": index, "round": number}) + "\n")
            if (index, number) in fails:
                file.flush()
                _fail(1, f"planted in plan {index}")
            forecast = plans[index].predicted
            # The first time is slower than the rounds, whose median is what counts.
            step_s = forecast.step_s * (1 + 0.01 * index) * (2.0 if not number else 1 + 0.1 * (number - 3))
            line = {"plan": index, "round": number, "step_s": step_s, "peak_bytes": round(1.01 * forecast.peak_bytes)}
            file.write(json.dumps(line) + "\n")


def _train(job: dict, rank: int) -> None:
    plan, run_dir = Plan.load(Path(job["plan"])), Path(job["run_dir"])
    seed = plan.workload.train.rng_seed
    if seed == 1:
        _fail(rank)
    if seed == 3 or rank:
        return
    (run_dir / "logs" / "threads").write_text(os.environ["OMP_NUM_THREADS"])
    stop = Path(job["stop_file"])
    while seed == 2 and not stop.exists():
        (run_dir / "waiting").touch()
        time.sleep(0.02)
    with (run_dir / "metrics.jsonl").open("a") as file:
        line = {"step": 1, "epoch": 1, "loss": 1.5, "grad_norm": 1.0, "lr": plan.workload.train.lr, "step_s": 0.1}
        file.write(json.dumps(line) + "\n")
    epoch = EpochRecord(
        epoch=1, train_loss=1.5, val_score=0.5, epoch_s=1.0, data_stall_s=0.0, sampling_weights=[0.25] * 4
    )
    Run(
        status="interrupted" if stop.exists() else "completed",
        rng_seed=seed,
        epochs=[epoch],
        best_epoch=1,
        test_score=0.75,
        data_stall_s=0.0,
        ranks=[],
        predicted=BriefForecast(step_s=0.2, peak_bytes=2 * 10**6) if plan.predicted else None,
        measured=Measured(step_s=0.1, peak_bytes=10**6),
    ).save(run_dir / "run.json")


def _fail(rank: int, message: str = "planted") -> None:
    if rank != 1:
        time.sleep(60)
    failure = {
        "rank": 1,
        "pp": 1,
        "dp": 0,
        "cp": 0,
        "exception": "ValueError",
        "message": message,
        "time": time.time(),
        "collective": False,
        "details": {},
    }
    log_dir = Path(os.environ["MGRAPH_LOG_DIR"])
    (log_dir / "rank-1.log").write_text("planted")
    (log_dir / "failure-rank-1.json").write_text(json.dumps(failure))
    sys.exit(1)


main()
