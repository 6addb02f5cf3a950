"""``mgraph validate`` around its workers: the plans they are given, what their measurements make, what fit learns."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megagraph_cli import recipes
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.validation import Validation
from megagraph_cli.commands import fit, tables, validate
from megagraph_cli.commands.learning import corrected
from megagraph_cli.commands.measuring import MOST_RELAUNCHES, Measured
from megagraph_cli.commands.validate import ValidateRequest
from megagraph_cli.commands.workloads import Folders, prepare, workload_of
from megagraph_cli.console import Screen
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed
from tests.cost import planted

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the built-in graph with planted times, and its cost model."""
    folder = tmp_path_factory.mktemp("validate")
    folders = Folders(folder / "none", folder / "cache")
    recipe = recipes.resolve("demo", None, ["model.num_layers=6", "batch.batch_size=32"])
    work = workload_of(recipe, *prepare(recipe.dataset, folders, Screen.stderr()))
    planted.profile(gpus=2, work=work).save(folder / "profile.json")
    fit.run(folder / "profile.json", folder / "cost_model.json", force=False)
    return folder


@pytest.fixture
def request_(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ValidateRequest:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    folders = Folders(folder / "none", folder / "cache")
    return ValidateRequest(folder / "cost_model.json", folders, plans=40, worker="commands_worker")


def test_plans_cover_every_dimension_and_the_pick_comes_first(request_: ValidateRequest) -> None:
    predictor, gpus, plans = validate.chosen(request_)
    assert (gpus, len(plans)) == (2, 40)
    steps = [plan.predicted.step_s for plan in plans if plan.predicted is not None]
    assert steps[0] == min(steps)
    seen = {
        "dims": {(plan.dims.pp, plan.dims.dp, plan.dims.cp) for plan in plans},
        "schedule": {plan.schedule for plan in plans},
        "recompute": {plan.recompute for plan in plans},
        "context": {plan.context for plan in plans},
    }
    assert {name: len(values) for name, values in seen.items()} == {
        "dims": 3,
        "schedule": 2,
        "recompute": 2,
        "context": 2,
    }
    deep = [plan for plan in plans if plan.dims.pp == 2]
    assert len({tuple(plan.layers_per_stage) for plan in deep}) >= 3
    assert len({plan.num_microbatches for plan in deep}) >= 3
    orders = [plan.model_dump_json(include=ORDER) for plan in plans]
    assert len(set(orders)) == 40
    assert [plan.model_dump_json(include=ORDER) for plan in validate.chosen(request_)[2]] == orders
    assert all(
        predictor.cost_model.machine.memory_bytes >= plan.predicted.peak_bytes for plan in plans if plan.predicted
    )


ORDER = {"dims", "layers_per_stage", "num_microbatches", "schedule", "recompute", "context"}


@pytest.mark.ranks
def test_measurements_become_an_artifact_that_fit_learns_from(
    request_: ValidateRequest, folder: Path, tmp_path: Path
) -> None:
    found = validate.run(replace(request_, plans=12), tmp_path / "validation.json", Screen.stderr())
    assert Validation.load(tmp_path / "validation.json") == found
    assert [reference.name for reference in found.inputs] == ["cost_model.json"]
    assert found.threads == CostModel.load(folder / "cost_model.json").threads == 1
    # Rounds two times as fast as the first look, and alternating around the prediction: their median is it.
    pick = found.plans[0]
    assert pick.measured.step_s == pytest.approx(pick.predicted.step_s, rel=1e-9)
    assert found.time.regret == 0.0
    assert found.memory.mape == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert found.memory.max_under == pytest.approx(0.01 / 1.01, rel=1e-2)
    # Four plans of twelve are measured again; the other eight stand at twice their time and a percent each.
    assert found.time.mape == pytest.approx(sum(0.5 for _ in range(8)) / 12, rel=0.15)

    learnt = fit.run(
        folder / "profile.json", tmp_path / "c.json", force=False, learn_from=[tmp_path / "validation.json"]
    )
    assert CostModel.load(tmp_path / "c.json") == learnt
    assert [reference.name for reference in learnt.inputs] == ["profile.json", "validation.json"]
    assert learnt.terms["margin"]["relative"] >= 0.01
    assert learnt.quality.time.num_held_out == 12
    for plan in found.plans:
        assert plan.predicted.peak_bytes * (1 + learnt.terms["margin"]["relative"]) >= plan.measured.peak_bytes


def test_fit_learns_a_factor_that_all_runs_share(folder: Path, tmp_path: Path) -> None:
    validation = planted_validation(folder, 1.5)
    validation.save(tmp_path / "v.json")
    learnt = fit.run(folder / "profile.json", tmp_path / "c.json", force=False, learn_from=[tmp_path / "v.json"])
    assert learnt.terms["calibration"]["pass"] == pytest.approx(1.5, rel=0.1)
    assert learnt.quality.time.mape is not None
    assert learnt.quality.time.mape < 0.05
    other = validation.workload.model_copy(
        update={"model": validation.workload.model.model_copy(update={"hidden_dim": 64})}
    )
    validation.model_copy(update={"workload": other}).save(tmp_path / "other.json")
    with pytest.raises(MgraphError, match=r"model\.hidden_dim") as caught:
        fit.run(folder / "profile.json", tmp_path / "d.json", force=False, learn_from=[tmp_path / "other.json"])
    assert caught.value.exit_code == 4


def test_fit_learns_only_from_runs_of_what_was_measured(folder: Path, tmp_path: Path) -> None:
    validation = planted_validation(folder, 1.0, plans=2)
    fitted = CostModel.load(folder / "cost_model.json")
    work, machine = validation.workload, validation.machine
    assert work.graph is not None
    changes = {
        "train.dtype = 'float64'": {"train": work.train.model_copy(update={"dtype": "float64"})},
        "train.matmul_precision = 'tf32'": {"train": work.train.model_copy(update={"matmul_precision": "tf32"})},
        f"graph.digest = '{'f' * 12}'": {"graph": work.graph.model_copy(update={"digest": "f" * 64})},
    }
    others = {words: {"workload": work.model_copy(update=change)} for words, change in changes.items()}
    for words, change in (("machine.device = 'cuda'", {"device": "cuda"}), ("machine.hosts = 2", {"hosts": 2})):
        others[words] = {"machine": machine.model_copy(update=change)}
    others["threads = 2"] = {"threads": 2}

    def learnt(update: dict[str, object], *, force: bool = False) -> CostModel:
        validation.model_copy(update=update).save(tmp_path / "v.json")
        return corrected(fitted, [tmp_path / "v.json"], force=force)

    for words, change in others.items():
        with pytest.raises(MgraphError, match=re.escape(words)) as caught:
            learnt(change)
        assert caught.value.exit_code == 4
    # The rest of [train] costs nothing, and --force passes any difference.
    slower = work.model_copy(update={"train": work.train.model_copy(update={"lr": 0.5})})
    assert learnt({"workload": slower}).terms == learnt({"machine": machine}).terms
    assert learnt({"threads": None}).terms == learnt({"threads": fitted.threads}).terms  # None: it is not known
    assert learnt(others["machine.hosts = 2"], force=True).terms == learnt({"machine": machine}).terms


def planted_validation(folder: Path, factor: float, plans: int = 24) -> Validation:
    """Plans of the cost model, each measured at ``factor`` times what it was predicted."""
    request = ValidateRequest(folder / "cost_model.json", Folders(folder, folder), plans=plans)
    predictor, _, run = validate.chosen(request)
    lines = [
        {
            "plan": number,
            "round": 0,
            "step_s": factor * plan.predicted.step_s,
            "peak_bytes": plan.predicted.peak_bytes,
        }
        for number, plan in enumerate(run)
        if plan.predicted is not None
    ]
    return validate.validation_of(predictor, run, Measured(lines), 8)


@pytest.mark.ranks
def test_a_failing_worker_is_named_and_nothing_is_written(
    request_: ValidateRequest, folder: Path, tmp_path: Path
) -> None:
    model = CostModel.load(folder / "cost_model.json")
    work = model.workload.model_copy(update={"train": model.workload.train.model_copy(update={"rng_seed": 1})})
    model.model_copy(update={"workload": work}).save(tmp_path / "seeded.json")
    request = replace(request_, cost_model_path=tmp_path / "seeded.json", plans=2)
    with pytest.raises(WorkerFailed, match=r"rank 1 .*planted"):
        validate.run(request, tmp_path / "v.json", Screen.stderr())
    assert [path.name for path in tmp_path.iterdir()] == ["seeded.json"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's workers leave their logs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.ranks
def test_a_plan_that_fails_is_left_out_and_the_others_are_judged(
    request_: ValidateRequest,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS_AT", "2.0 1.3")  # one as it runs first, one in the third round
    found = validate.run(replace(request_, plans=6), tmp_path / "v.json", Screen.stderr())
    assert Validation.load(tmp_path / "v.json") == found
    assert [plan.number for plan in found.failed] == [1, 2]
    assert "planted in plan 1" in found.failed[0].message
    assert "planted in plan 2" in found.failed[1].message
    _, _, plans = validate.chosen(replace(request_, plans=6))
    assert [plan.predicted.step_s for plan in found.failed] == [plans[number].predicted.step_s for number in (1, 2)]  # type: ignore[union-attr]
    for plan, number in zip(found.plans, (0, 3, 4, 5), strict=True):
        # All four stand at the median of five rounds: not at the first look, nor at what was left of three rounds.
        assert plan.measured.step_s == pytest.approx(plans[number].predicted.step_s * (1 + 0.01 * number))  # type: ignore[union-attr]
    assert found.time.regret == 0.0
    said = capsys.readouterr().err
    dims = plans[2].dims
    assert f"plan 2 (pp={dims.pp} dp={dims.dp} cp={dims.cp}" in said
    assert "the validation is of 4 of 6 plans: 2 failed\n" in said
    for named in re.findall(r"its log is (\S+)", said):
        assert Path(named).is_relative_to(temporary)
        assert Path(named).exists()
    tables.show_validation(found, tmp_path / "v.json", Screen.stderr())
    shown = capsys.readouterr().err
    assert [label for label in ("pick", "#1", "#2", "#3", "#4", "#5") if label in shown] == ["pick", "#3", "#4", "#5"]


@pytest.mark.ranks
def test_where_the_pick_fails_its_regret_is_not_known(
    request_: ValidateRequest,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS_AT", "0.1")
    found = validate.run(replace(request_, plans=3), tmp_path / "v.json", Screen.stderr())
    assert ([plan.number for plan in found.failed], len(found.plans)) == ([0], 2)
    assert found.time.regret is None
    assert "the plan that the search puts first (pp=" in capsys.readouterr().err
    tables.show_validation(found, tmp_path / "v.json", Screen.stderr())
    assert "pick " not in capsys.readouterr().err.replace("of the pick", "")
    assert len(list(temporary.iterdir())) == 1


@pytest.mark.ranks
def test_after_a_few_failures_what_was_measured_is_written(
    request_: ValidateRequest,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS_AT", " ".join(f"{number}.0" for number in range(1, 9)))
    found = validate.run(replace(request_, plans=9), tmp_path / "v.json", Screen.stderr())
    assert [plan.number for plan in found.failed] == [*range(1, 2 + MOST_RELAUNCHES)]
    assert len(found.plans) == 1
    assert found.time.regret is None  # no plan was measured beside another
    assert "1 of 9 plans: 4 failed and 4 not run" in capsys.readouterr().err
    assert temporary.exists()


@pytest.mark.ranks
@pytest.mark.usefixtures("temporary")
def test_where_no_plan_ran_well_the_workers_failure_is_the_commands(
    request_: ValidateRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS_AT", "0.0 1.0")
    with pytest.raises(WorkerFailed, match="planted in plan 1") as caught:
        validate.run(replace(request_, plans=2), tmp_path / "v.json", Screen.stderr())
    assert caught.value.exit_code == EXIT_WORKER
    assert not (tmp_path / "v.json").exists()


def test_too_few_steps_or_another_device_are_refused(request_: ValidateRequest, tmp_path: Path) -> None:
    for change, code in (({"steps": 3}, 2), ({"device": "cuda"}, 4), ({"mem_bytes": 1000}, 3)):
        with pytest.raises(MgraphError) as caught:
            validate.run(replace(request_, **change), tmp_path / "v.json", Screen.stderr())  # type: ignore[arg-type]
        assert caught.value.exit_code == code
