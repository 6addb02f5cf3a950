"""``mgraph train`` around its workers: the run directory, what may be changed, and run.json when workers cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megagraph_cli import machine
from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import Failure, Run
from megagraph_cli.commands import devices, orders, rundir, train
from megagraph_cli.commands.train import TrainRequest
from megagraph_cli.commands.workloads import Folders
from megagraph_cli.console import Screen
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.address import Hosts
from tests.artifacts import examples

TESTS = Path(__file__).parents[1]


@pytest.fixture
def request_in(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> TrainRequest:
    """A request in an empty working folder that holds a hand-written plan.json, with fake workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    write_plan(Path("plan.json"))
    base = tmp_path_factory.getbasetemp()
    return TrainRequest(Folders(base / "no-data", base / "cache"), worker="commands_worker")


def write_plan(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(examples.hand_written_plan() | changes), encoding="utf-8")


def expect_failure(request: TrainRequest, exit_code: int, named: str) -> MgraphError:
    with pytest.raises(MgraphError, match=named) as caught:
        train.run(request, Screen.stderr())
    assert caught.value.exit_code == exit_code
    return caught.value


@pytest.mark.ranks
def test_runs_are_numbered_and_never_overwritten(request_in: TrainRequest) -> None:
    run, where = train.run(request_in, Screen.stderr())
    assert (run.status, where) == ("completed", Path("runs/demo-1"))
    assert {path.name for path in where.iterdir()} == {
        "plan.json",
        "job.json",
        "run.json",
        "metrics.jsonl",
        "logs",
        "checkpoints",
    }
    assert (where / "plan.json").read_bytes() == Path("plan.json").read_bytes()
    _, second = train.run(replace(request_in, sets=("train.lr=0.5",), epochs=3), Screen.stderr())
    assert second == Path("runs/demo-2")
    copied = Plan.load(second / "plan.json")
    assert (copied.workload.train.lr, copied.workload.train.epochs) == (0.5, 3)
    job = json.loads((second / "job.json").read_text(encoding="utf-8"))
    assert (job["epochs"], job["overrides"]) == (3, {"train.lr": 0.5, "train.epochs": 3})


@pytest.mark.ranks
@pytest.mark.parametrize(("measured", "given", "said"), [(1, 1, False), (8, 4, True), (None, 4, False)])
def test_workers_have_the_threads_that_the_plan_counts_on(
    measured: int | None,
    given: int,
    said: bool,
    request_in: TrainRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    if measured is not None:
        write_plan(Path("plan.json"), threads=measured)
    _, where = train.run(request_in, Screen.stderr())
    assert json.loads((where / "job.json").read_text(encoding="utf-8"))["threads"] == given
    assert (where / "logs" / "threads").read_text(encoding="utf-8") == str(given)
    assert ("counts on workers with 8 threads" in capsys.readouterr().err) == said


@pytest.mark.ranks
def test_a_failed_worker_leaves_a_run_json_that_says_so(request_in: TrainRequest) -> None:
    error = expect_failure(
        replace(request_in, sets=("train.rng_seed=1",), run_dir=Path("mine")), EXIT_WORKER, "planted"
    )
    run = Run.load(Path("mine/run.json"))
    assert run.status == "failed"
    assert run.failure is not None
    assert (run.failure.rank, run.failure.pp, run.failure.exception) == (1, 1, "ValueError")
    assert run.failure.message == error.message


@pytest.mark.ranks
def test_restarts_end_with_their_number(request_in: TrainRequest, capsys: pytest.CaptureFixture[str]) -> None:
    failing = replace(request_in, sets=("train.rng_seed=1",), run_dir=Path("mine"), max_restarts=1)
    expect_failure(failing, EXIT_WORKER, "planted")
    assert capsys.readouterr().err.count("going on from step 0 (restart 1 of 1)") == 1
    run = Run.load(Path("mine/run.json"))
    assert (run.status, [each.message for each in run.restarts]) == ("failed", [run.failure.message])  # type: ignore[union-attr]
    job = json.loads(Path("mine/job.json").read_text(encoding="utf-8"))
    assert (job["resume"], len(job["restarts"])) == (True, 1)


@pytest.mark.parametrize(
    ("exit_code", "exception", "may_pass"),
    [(EXIT_WORKER, "ValueError", True), (EXIT_WORKER, "MgraphError", False), (EXIT_STALE, "ValueError", False)],
)
def test_what_the_user_has_to_change_is_not_tried_again(exit_code: int, exception: str, may_pass: bool) -> None:
    failure = Failure(rank=0, pp=0, dp=0, cp=0, exception=exception, message="the loss is not finite")
    assert WorkerFailed("the loss is not finite", failure, exit_code).may_pass is may_pass


def test_a_failure_keeps_the_whole_epochs_of_the_newest_checkpoint(request_in: TrainRequest) -> None:
    plan = Plan.load(Path("plan.json"))
    run_dir = Path("mine")
    run_dir.mkdir()
    rundir.put_plan(run_dir, plan, Path("plan.json"), changed=False)
    (run_dir / "run.json").write_text("{damaged", encoding="utf-8")
    failure = Failure(rank=1, pp=1, dp=0, cp=0, signal="SIGKILL", message="rank 1 was killed by SIGKILL")
    assert rundir.record(run_dir, plan, failure).epochs == []  # the damaged run.json does not mask the failure

    for step, count in ((7, 1), (14, 2)):
        epochs = [
            {
                "epoch": epoch,
                "train_loss": 1.5,
                "val_score": 0.5,
                "epoch_s": 1.0,
                "data_stall_s": 0.0,
                "sampling_weights": [0.25] * 4,
            }
            for epoch in range(1, count + 1)
        ]
        folder = run_dir / "checkpoints" / f"step-{step:09d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"epochs": epochs, "best_epoch": 1}), encoding="utf-8")
    rundir.record(run_dir, plan, failure)
    run = Run.load(run_dir / "run.json")
    assert ([epoch.epoch for epoch in run.epochs], run.best_epoch) == ([1, 2], 1)
    assert run.failure == failure
    assert run.inputs == [reference_to(run_dir / "plan.json")]

    (folder / "state.json").write_text("{", encoding="utf-8")  # then what the run.json before knew
    assert [epoch.epoch for epoch in rundir.record(run_dir, plan, failure).epochs] == [1, 2]


def test_a_forecast_without_a_digest_is_sealed_when_it_is_forced(request_in: TrainRequest) -> None:
    plan = examples.plan()
    values = plan.canonical() | {"digest": None}
    Path("plan.json").write_text(json.dumps(values), encoding="utf-8")
    expect_failure(request_in, EXIT_STALE, "digest")
    checked = orders.check(replace(request_in, force=True))
    assert checked.changed
    Path("mine").mkdir()
    rundir.put_plan(Path("mine"), checked.plan, checked.source, changed=checked.changed)
    assert Plan.load(Path("mine/plan.json")).digest_matches()


@pytest.mark.ranks
def test_workers_that_end_without_a_run_json_are_a_failure(request_in: TrainRequest) -> None:
    expect_failure(replace(request_in, sets=("train.rng_seed=3",)), EXIT_WORKER, "without a run.json")


def test_a_dry_run_prints_torchruns_command_and_writes_nothing(request_in: TrainRequest, tmp_path: Path) -> None:
    command = train.command_line(replace(request_in, worker=orders.WORKER))
    assert "--nproc-per-node=2" in command
    assert command[-2:] == ["megagraph_cli.runtime.train", "runs/demo-1/job.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_run_directory_in_use_is_refused(request_in: TrainRequest) -> None:
    Path("used").mkdir()
    Path("used/file").touch()
    expect_failure(replace(request_in, run_dir=Path("used")), EXIT_USAGE, "not empty")
    expect_failure(replace(request_in, run_dir=Path("plan.json")), EXIT_USAGE, "not empty")
    assert not Path("runs").exists()


def test_only_train_keys_may_be_set(request_in: TrainRequest) -> None:
    expect_failure(replace(request_in, sets=("model.num_layers=3",)), EXIT_USAGE, "profile again")
    expect_failure(replace(request_in, sets=("train.lr=-1",)), EXIT_USAGE, "train.lr")


def test_device_dataset_and_graph_must_be_the_plans(request_in: TrainRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 1)
    write_plan(Path("plan.json"), device="cpu")
    expect_failure(replace(request_in, device="cuda"), EXIT_STALE, "made for cpu")
    expect_failure(replace(request_in, dataset="cora"), EXIT_STALE, "dataset.name")
    expect_failure(replace(request_in, recipe="products"), EXIT_STALE, "products")
    write_plan(Path("plan.json"), device="cuda")
    expect_failure(request_in, EXIT_USAGE, "this machine has 1")
    examples.plan().save(Path("plan.json"))  # carries the digest of another graph
    expect_failure(request_in, EXIT_STALE, "another content of demo")
    assert not Path("runs").exists()


def test_a_plan_for_several_hosts_is_refused(request_in: TrainRequest) -> None:
    write_plan(Path("plan.json"), hosts=2)
    expect_failure(request_in, EXIT_USAGE, "2 hosts")


@pytest.fixture
def resumable(request_in: TrainRequest) -> TrainRequest:
    """A request to go on in a run that was started with another learning rate."""
    run_dir = Path("runs/demo-1")
    run_dir.mkdir(parents=True)
    plan = Plan.load(Path("plan.json"))
    changed = plan.workload.model_copy(update={"train": plan.workload.train.model_copy(update={"lr": 0.5})})
    plan.model_copy(update={"workload": changed}).save(run_dir / "plan.json")
    rundir.put_job(run_dir, {"overrides": {"train.lr": 0.5}})
    return replace(request_in, resume=run_dir)


def test_a_resumed_run_keeps_its_plan_and_what_was_changed(resumable: TrainRequest) -> None:
    order = orders.check(resumable)
    assert order.plan.workload.train.lr == 0.5
    assert (order.changed, order.overrides) == (False, {"train.lr": 0.5})
    longer = orders.check(replace(resumable, epochs=77))
    assert (longer.plan.workload.train.lr, longer.plan.workload.train.epochs) == (0.5, 77)


def test_another_plan_for_the_same_workload_takes_over_the_changes(resumable: TrainRequest) -> None:
    write_plan(Path("other.json"), dims={"pp": 1, "dp": 2, "cp": 1}, layers_per_stage=[4])
    order = orders.check(replace(resumable, plan_path=Path("other.json")))
    assert (order.plan.dims.dp, order.plan.workload.train.lr) == (2, 0.5)


def test_a_resume_with_another_workload_exits_4(resumable: TrainRequest) -> None:
    values = examples.hand_written_plan()
    values["workload"]["batch"]["batch_size"] = 99
    Path("other.json").write_text(json.dumps(values), encoding="utf-8")
    expect_failure(replace(resumable, plan_path=Path("other.json")), EXIT_STALE, "batch.batch_size = 99")
    expect_failure(replace(resumable, sets=("train.lr=0.25",)), EXIT_STALE, "train.epochs alone")


def test_what_is_no_run_cannot_be_resumed(request_in: TrainRequest) -> None:
    expect_failure(replace(request_in, resume=Path("nowhere")), EXIT_USAGE, "no run directory")
    before = set(Path().iterdir())  # a plan.json alone makes no run
    expect_failure(replace(request_in, resume=Path()), EXIT_USAGE, "no run directory")
    assert set(Path().iterdir()) == before


def test_what_force_passes_is_said(request_in: TrainRequest) -> None:
    plan = examples.plan().save(Path("plan.json"))
    assert orders.check(request_in).warnings == ()
    (said,) = orders.check(replace(request_in, dataset="cora", force=True)).warnings
    assert "'demo', not 'cora'" in said
    assert said.endswith("--force trains what the plan says")
    values = plan.model_dump(mode="json", by_alias=True)
    values["num_microbatches"] += 1
    Path("plan.json").write_text(json.dumps(values), encoding="utf-8")
    (said,) = orders.check(replace(request_in, force=True)).warnings
    assert "was changed after it was written" in said


def test_restarts_on_several_hosts_are_refused_before_hosts_wait(request_in: TrainRequest) -> None:
    hosts = Hosts.of(2, 0, "127.0.0.1:1")
    expect_failure(replace(request_in, max_restarts=1, hosts=hosts), EXIT_USAGE, "one host")


@pytest.mark.parametrize(
    ("dataset", "slug"),
    [
        ("citeseer", "citeseer"),
        ("synthetic:nodes=10,edges=20", "synthetic"),
        ("/data/my graph.npz", "my-graph"),
        ("/data/...npz", "run"),
    ],
)
def test_a_run_is_named_after_its_dataset(dataset: str, slug: str) -> None:
    assert rundir.slug(dataset) == slug


@pytest.mark.ranks
def test_sigterm_ends_with_the_workers_own_run_json_and_no_stop_file(request_in: TrainRequest, tmp_path: Path) -> None:
    write_plan(Path("plan.json"), workload=examples.workload(None).model_dump(mode="json", exclude={"graph"}))
    caller = (
        "import sys; from pathlib import Path; from megagraph_cli.commands.train import TrainRequest, run\n"
        "from megagraph_cli.commands.workloads import Folders; from megagraph_cli.console import Screen\n"
        "folders = Folders(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "run(TrainRequest(folders, sets=('train.rng_seed=2',), worker='commands_worker'), Screen.stderr())\n"
    )
    folders = request_in.folders
    process = subprocess.Popen(
        [sys.executable, "-c", caller, str(folders.root), str(folders.cache)], stderr=subprocess.PIPE, text=True
    )
    run_dir = tmp_path / "runs" / "demo-1"
    deadline = time.monotonic() + 60
    while not (run_dir / "waiting").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert f"training was interrupted; go on with mgraph train --resume {Path('runs/demo-1')}" in err
    assert Run.load(run_dir / "run.json").status == "interrupted"
    assert not (run_dir / "stop").exists()
