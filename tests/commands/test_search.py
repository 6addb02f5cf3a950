"""``mgraph search`` as a function: requests, refusals and the plan it writes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megagraph_cli import recipes
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.commands import fit, search, tables
from megagraph_cli.commands.search import SearchRequest
from megagraph_cli.console import Screen
from megagraph_cli.errors import MgraphError
from tests.cost import planted


@pytest.fixture
def request_(tmp_path: Path) -> SearchRequest:
    planted.profile().save(tmp_path / "profile.json")
    fit.run(tmp_path / "profile.json", tmp_path / "cost_model.json", force=False)
    return SearchRequest(tmp_path / "cost_model.json")


def test_defaults_come_from_the_profile(request_: SearchRequest, tmp_path: Path) -> None:
    plan = search.run(request_, tmp_path / "plan.json")
    assert (plan.gpus, plan.device, plan.memory_limit_bytes) == (4, "cpu", planted.Planted().memory_bytes)
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.predicted is not None
    assert plan.search is not None
    assert len(plan.runners_up) == 5
    assert plan.pareto[0].predicted.peak_bytes == plan.predicted.peak_bytes
    assert plan.pareto[0].predicted.step_s == pytest.approx(plan.predicted.step_s, rel=1e-9)


def test_a_plan_counts_on_the_threads_that_were_measured(tmp_path: Path) -> None:
    profile = planted.profile()
    host = [sample.model_copy(update={"threads": 3}) for sample in profile.host]
    profile.model_copy(update={"host": host}).save(tmp_path / "profile.json")
    fit.run(tmp_path / "profile.json", tmp_path / "cost_model.json", force=False)
    request = SearchRequest(tmp_path / "cost_model.json")
    assert [search.find(replace(request, gpus=gpus)).plan.threads for gpus in (1, 4, 8)] == [3, 3, 3]


def test_the_same_bytes_twice(request_: SearchRequest, tmp_path: Path) -> None:
    request = replace(request_, gpus=8, overrides={"model.num_layers": "12"})
    search.run(request, tmp_path / "a.json")
    search.run(request, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_overrides_change_the_workload_and_are_said_to_extrapolate(request_: SearchRequest, tmp_path: Path) -> None:
    overrides = {"model.num_layers": "24", "batch.batch_size": "4096"}
    request = replace(request_, gpus=8, pp=1, dp=8, microbatches=1, overrides=overrides)
    plan = search.run(request, tmp_path / "plan.json")
    assert plan.workload.model.num_layers == sum(plan.layers_per_stage) == 24
    assert plan.workload.batch.batch_size == 4096
    said = {item.quantity: (item.measured_max, item.asked) for item in plan.extrapolated}
    assert said == {"gpus": (4, 8), "layers": (4, 24), "microbatch_size": (64, 512)}


def test_micro_batches_smaller_than_any_measured_are_said_to_extrapolate(
    request_: SearchRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = request_.cost_model_path
    found = CostModel.load(path)
    sizes = {sample.microbatch_size for sample in planted.profile().compute if sample.module == "layer"}
    assert {way.least_microbatch_size for way in found.measured.ways} == {min(sizes)}
    request = replace(request_, gpus=1, microbatches=8, recompute="none")

    def said(least: int | None) -> list[tuple[str, float, float]]:
        """Of a plan whose micro-batches are an eighth of the batch, where the plain way was measured from there on."""
        ways = [
            way.model_copy(update={"least_microbatch_size": least}) if way.recompute == "none" else way
            for way in found.measured.ways
        ]
        found.model_copy(update={"measured": found.measured.model_copy(update={"ways": ways})}).save(path)
        plan = search.run(request, tmp_path / "plan.json")
        tables.warn_extrapolated(plan, Screen.stderr())
        return [(each.quantity, each.measured_max, each.asked) for each in plan.extrapolated]

    asked = found.workload.batch.batch_size // 8
    assert min(sizes) < asked < max(sizes)
    assert said(asked) == said(None) == []
    # A cost model from before it was kept has no such key, and keeps its digest.
    unknown = found.measured.ways[0].model_copy(update={"least_microbatch_size": None})
    assert "least_microbatch_size" not in unknown.model_dump()
    assert capsys.readouterr().err == ""
    assert said(asked + 1) == [("microbatch_size", max(sizes), asked)]
    assert f"microbatch_size {asked} (less than was measured)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"overrides": {"model.hidden_dim": "64"}}, 2, "profile again"),
        ({"overrides": {"model.num_layers": "four"}}, 2, "model.num_layers=four"),
        ({"overrides": {"batch.batch_size": "0"}}, 2, "batch.batch_size=0"),
        ({"device": "cuda"}, 4, "made for cpu, not cuda"),
        ({"mem_bytes": 1000}, 3, "--mem 193MiB"),
        ({"gpus": 5000}, 2, "--gpus 5000"),
        ({"pp": 3}, 2, "--pp 3"),
        ({"pp": 1, "layers": [1, 3]}, 2, "--layers 1,3 is 2 stages but --pp says 1"),
    ],
)
def test_refusals(request_: SearchRequest, tmp_path: Path, change: dict[str, object], code: int, words: str) -> None:
    with pytest.raises(MgraphError) as caught:
        search.run(replace(request_, **change), tmp_path / "plan.json")  # type: ignore[arg-type]
    assert caught.value.exit_code == code
    assert words in caught.value.message
    assert not (tmp_path / "plan.json").exists()


def test_a_pinned_split_is_taken_as_it_is(request_: SearchRequest, tmp_path: Path) -> None:
    request = replace(request_, layers=[1, 3], microbatches=4, schedule="1f1b", dp=2)
    plan = search.run(request, tmp_path / "plan.json")
    assert (plan.layers_per_stage, plan.num_microbatches, plan.schedule) == ([1, 3], 4, "1f1b")


def test_the_largest_stage_is_the_plans_peak(request_: SearchRequest, tmp_path: Path) -> None:
    plan = search.run(replace(request_, pp=2, cp=1), tmp_path / "plan.json")
    assert plan.predicted is not None
    totals = [sum(stage.memory_bytes.values()) for stage in plan.predicted.stages]
    assert len(totals) == len(plan.layers_per_stage) == 2
    assert max(totals) == plan.predicted.peak_bytes


def test_gradients_larger_than_any_measured_message_are_said_to_extrapolate(
    request_: SearchRequest, tmp_path: Path
) -> None:
    path = request_.cost_model_path
    found = CostModel.load(path)
    weights = found.workload.parameters().of_model(found.workload.model.num_layers) * found.workload.itemsize_bytes
    narrow = found.measured.model_copy(update={"message_bytes": weights - 1})
    found.model_copy(update={"measured": narrow}).save(path)
    for degrees, expected in (({"dp": 2}, [(weights - 1, weights)]), ({"cp": 2}, [(weights - 1, weights)])):
        plan = search.run(replace(request_, gpus=2, pp=1, **degrees), tmp_path / "plan.json")
        said = [(each.measured_max, each.asked) for each in plan.extrapolated if each.quantity == "message_bytes"]
        assert said == expected
    alone = search.run(replace(request_, gpus=1), tmp_path / "plan.json")
    assert "message_bytes" not in {each.quantity for each in alone.extrapolated}


def test_a_table_is_no_message_but_its_touched_rows_are(tmp_path: Path) -> None:
    work = planted.workload(embedding="table")
    assert work.graph is not None
    large = work.model_copy(update={"graph": work.graph.model_copy(update={"nodes": 2_000_000})})
    planted.profile(work=large).save(tmp_path / "profile.json")
    fit.run(tmp_path / "profile.json", tmp_path / "cost_model.json", force=False)
    request = SearchRequest(tmp_path / "cost_model.json", gpus=2, pp=1, dp=2, microbatches=1)
    path, counts = request.cost_model_path, large.parameters()
    dense = (counts.of_model(large.model.num_layers) - counts.table) * 4
    # Each of two replicas looks up 16 rows for each of 128 targets, of 2,000,200 of which then one comes twice: rows of
    # 32 numbers, which all have in the end, in one piece.
    message = 2 * (128 * 16 - 1) * 32 * 4
    assert dense < message < counts.table * 4
    found = CostModel.load(path)
    for most, asked in ((message, []), (message - 1, [message])):
        found.model_copy(update={"measured": found.measured.model_copy(update={"message_bytes": most})}).save(path)
        plan = search.run(request, tmp_path / "plan.json")
        said = [each.asked for each in plan.extrapolated if each.quantity == "message_bytes"]
        assert said == asked


def test_more_touched_rows_than_any_that_were_measured_are_said_to_extrapolate(tmp_path: Path) -> None:
    work = planted.workload(embedding="both")
    planted.profile(work=work).save(tmp_path / "profile.json")
    fit.run(tmp_path / "profile.json", tmp_path / "cost_model.json", force=False)
    request = SearchRequest(tmp_path / "cost_model.json", gpus=2, pp=1, dp=2, microbatches=1)
    found = CostModel.load(request.cost_model_path)
    # All 2000 nodes and 200 clusters, 32 numbers of four bytes each: nearly all are touched by each of two replicas.
    most = 2200 * 32 * 4
    assert found.measured.touched_bytes == most
    for measured, asked in ((most, []), (most - 1, [most])):
        narrow = found.measured.model_copy(update={"touched_bytes": measured})
        found.model_copy(update={"measured": narrow}).save(request.cost_model_path)
        plan = search.run(request, tmp_path / "plan.json")
        assert [each.asked for each in plan.extrapolated if each.quantity == "touched_bytes"] == asked


def test_a_term_that_was_never_measured_is_added_by_the_call_that_is_named(tmp_path: Path) -> None:
    profile = planted.profile(gpus=1)
    profile.save(tmp_path / "profile.json")
    fit.run(tmp_path / "profile.json", tmp_path / "cost_model.json", force=False)
    with pytest.raises(MgraphError) as caught:
        search.run(SearchRequest(tmp_path / "cost_model.json", gpus=8), tmp_path / "plan.json")
    assert caught.value.exit_code == 4
    call = shlex.split(caught.value.message.split("`")[1])
    assert call[:2] == ["mgraph", "profile"]
    flags = list(zip(call[2::2], call[3::2], strict=True))
    assert [value for flag, value in flags if flag in ("--gpus", "--device")] == ["cpu", "2"]
    (dataset,) = (value for flag, value in flags if flag == "--dataset")
    sets = [value for flag, value in flags if flag == "--set"]
    assert recipes.resolve(dataset, None, sets) == profile.workload.recipe()


def test_force_plans_for_another_device(request_: SearchRequest, tmp_path: Path) -> None:
    assert search.run(replace(request_, device="cuda", force=True), tmp_path / "plan.json").device == "cuda"


NOWHERE = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator,UserWideCacheLocator"}
"""numba may not write beside the sources, as where they belong to somebody else."""


def search_deep_pipelines(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A search that runs compiled code, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "MGRAPH_CACHE")}
    flags = "--gpus 4 --pp 4 --cp 1 --dp 1 --schedule 1f1b --json --debug"
    return subprocess.run(
        [sys.executable, "-m", "megagraph_cli.cli", "search", *flags.split()],
        cwd=folder,
        env=kept | NOWHERE | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_compiled_code_is_kept_beside_the_prepared_graphs(request_: SearchRequest, tmp_path: Path) -> None:
    done = search_deep_pipelines(tmp_path, MGRAPH_CACHE=str(tmp_path / "graphs"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "graphs" / "numba").rglob("levels.*.nbi"))) == 1


def test_a_search_that_can_keep_nothing_still_finds_its_plan(request_: SearchRequest, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder can be made in here", encoding="utf-8")
    places = {"MGRAPH_CACHE": str(file / "graphs"), "HOME": str(file), "XDG_CACHE_HOME": str(file / "cache")}
    done = search_deep_pipelines(tmp_path, **places)
    assert done.returncode == 0, done.stderr
    assert Plan.load(tmp_path / "plan.json").schedule == "1f1b"
