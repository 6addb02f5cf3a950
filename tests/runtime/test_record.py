"""metrics.jsonl and run.json: what is appended, cut back, gathered and left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megagraph_cli.artifacts.run import EpochRecord, Run
from megagraph_cli.layout.dims import Place
from megagraph_cli.runtime.checkpoint import TrainState
from megagraph_cli.runtime.record import MetricsFile, RankMeter, write_run
from tests.artifacts import examples


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_keep_every_digit(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    loss = 0.1 + 0.2
    file.append({"step": 1, "loss": loss})
    assert json.loads(file.path.read_text(encoding="utf-8")) == {"step": 1, "loss": loss}


@pytest.mark.parametrize("tail", ["", '{"step": 9, "lo', "\n", "null\n", '{"loss": 1.0}\n'])
def test_cutting_back_drops_later_steps_and_broken_lines(tail: str, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 9):
        file.append({"step": step})
    with file.path.open("a", encoding="utf-8") as out:
        out.write(tail)
    file.cut_back(5)
    file.append({"step": 6})
    assert steps_of(file.path) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    file.cut_back(0)
    assert steps_of(file.path) == []


def test_cutting_back_what_is_not_there_makes_no_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").cut_back(3)
    assert not list(tmp_path.iterdir())


def test_a_ranks_step_time_is_the_median_after_three_steps_and_its_peak_the_largest() -> None:
    meter = RankMeter(3, Place(1, 0, 1), step_s=[100.0, 100.0, 100.0, 1.0, 5.0, 2.0])
    for peak in (10, 30, 20):
        meter.saw_peak(peak)
    record = meter.record()
    assert (record.rank, record.pp, record.dp, record.cp) == (3, 1, 0, 1)
    assert (record.step_s, record.peak_bytes) == (2.0, 30)


def test_a_later_peak_without_categories_keeps_those_of_the_largest_metered_one() -> None:
    meter = RankMeter(0, Place(0, 0, 0))
    for peak, memory in ((10, {"activations": 10}), (30, {"activations": 30}), (20, {"activations": 20}), (40, None)):
        meter.saw_peak(peak, memory)
    assert (meter.record().peak_bytes, meter.record().memory) == (40, {"activations": 30})


def test_what_was_not_measured_is_null() -> None:
    record = RankMeter(0, Place(0, 0, 0), step_s=[1.0, 1.0, 1.0]).record()
    assert (record.step_s, record.peak_bytes) == (None, None)


def written(run_dir: Path, meter: RankMeter, state: TrainState, *, forecast: bool) -> Run:
    plan = examples.plan()
    plan = plan if forecast else plan.model_copy(update={"predicted": None, "digest": None})
    plan.save(run_dir / "plan.json")
    write_run(run_dir, plan, "completed", state, meter, 0.5)
    return Run.load(run_dir / "run.json")


@pytest.mark.usefixtures("alone")
def test_run_json_holds_what_was_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    meter = RankMeter(0, Place(0, 0, 0), step_s=[9.0, 9.0, 9.0, 0.5, 0.25, 1.0], stall_s=3.0, peak_bytes=2000)
    epoch = EpochRecord(
        epoch=1, train_loss=1.5, val_score=0.5, epoch_s=2.0, data_stall_s=0.1, sampling_weights=[0.25] * 4
    )
    state = TrainState(
        workload_digest="", step=6, sampling_weights=[0.25] * 4, epochs=[epoch], best_epoch=1, best_step=6
    )
    run = written(tmp_path, meter, state, forecast=True)
    assert (run.status, run.best_epoch, run.test_score, run.epochs) == ("completed", 1, 0.5, [epoch])
    assert run.predicted is not None
    assert (run.predicted.step_s, run.predicted.peak_bytes) == (0.5, 1000)
    assert (run.measured.step_s, run.measured.peak_bytes) == (0.5, 2000)
    assert run.data_stall_s == 3.0 / 6
    assert [reference.name for reference in run.inputs] == ["plan.json"]


@pytest.mark.usefixtures("alone")
def test_a_run_without_steps_or_forecast_has_nulls(tmp_path: Path) -> None:
    state = TrainState(workload_digest="", sampling_weights=[0.25] * 4)
    run = written(tmp_path, RankMeter(0, Place(0, 0, 0)), state, forecast=False)
    assert run.predicted is None
    assert (run.measured.step_s, run.measured.peak_bytes, run.data_stall_s) == (None, None, None)


@pytest.mark.usefixtures("alone")
def test_a_launch_without_a_step_keeps_what_was_measured_before(tmp_path: Path) -> None:
    state = TrainState(workload_digest="", sampling_weights=[0.25] * 4)
    meter = RankMeter(0, Place(0, 0, 0), step_s=[9.0, 9.0, 9.0, 0.5], stall_s=2.0, peak_bytes=2000)
    before = written(tmp_path, meter, state, forecast=True)
    after = written(tmp_path, RankMeter(0, Place(0, 0, 0)), state, forecast=True)
    assert (after.measured, after.ranks, after.data_stall_s) == (before.measured, before.ranks, 0.5)
    other = written(tmp_path, RankMeter(0, Place(0, 0, 0)), state, forecast=False)  # another plan
    assert (other.measured.step_s, other.measured.peak_bytes, other.data_stall_s) == (None, None, None)
