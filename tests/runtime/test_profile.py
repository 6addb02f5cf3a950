"""The profile: which sizes it takes, and that what it measured is whole and consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.artifacts.profile import CommSample, ComputeSample, Profile
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import role_of
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.parameters import ParameterCounts
from megagraph_cli.runtime.grid import MESSAGE_BYTES, Grid
from megagraph_cli.runtime.job import ProfileJob
from megagraph_cli.runtime.probes import Context
from megagraph_cli.runtime.profile import BUDGET_S, ENDING_S, Profiler
from megagraph_cli.runtime.setup import Worker
from tests.artifacts import examples
from tests.runtime.small import BATCH, CPU, small_graph, small_workload


@pytest.mark.parametrize(("batch_size", "largest"), [(1024, 10**6), (8192, 100), (1, 1), (5, 3), (16, 0)])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 16])
@pytest.mark.parametrize("quick", [True, False])
def test_sizes_fit_the_workload_and_tell_a_constant_from_a_slope(
    batch_size: int, largest: int, num_layers: int, quick: bool
) -> None:
    grid = Grid.of(batch_size, num_layers, quick=quick, largest=largest)
    top = max(1, min(batch_size, largest))
    assert max(grid.microbatches) == max(grid.targets) == top
    assert min(grid.microbatches) == max(1, top // (8 if quick else 16))
    assert list(grid.microbatches) == sorted(set(grid.microbatches))
    assert len(grid.microbatches) >= 2 or top == 1
    # The last layer of a model is another module: a run of middle layers is at most one shorter than the model.
    assert grid.layers[0] == 1
    assert max(grid.layers) <= max(1, num_layers - 1)
    assert set(grid.messages) <= set(MESSAGE_BYTES)
    assert min(grid.messages) <= 2**10
    assert max(grid.messages) >= 2**22


LAUNCHED_S = 1e9


class Clock:
    """Seconds since the epoch: some have gone by since the launch, and as many more go by at every look."""

    def __init__(self, gone_s: float, each_s: float) -> None:
        self.now_s, self.each_s = LAUNCHED_S + gone_s, each_s

    def __call__(self) -> float:
        self.now_s += self.each_s
        return self.now_s


def profiler(folder: Path, clock: Clock, budget_s: float | None, embedding: str = "auto") -> Profiler:
    """One that measures a small model on this process alone."""
    graph = small_graph()
    workload = small_workload(graph, model={"embedding": embedding}, train={"dtype": "float32"})
    split = make_split(graph, workload.dataset.split, workload.dataset.split_seed)
    job = ProfileJob(
        graph_path=folder,
        device="cpu",
        threads=1,
        launcher_pid=0,
        workload=workload,
        quick=False,
        launched_s=LAUNCHED_S,
        budget_s=budget_s,
        out=folder / "profile.json",
        progress_file=folder / "progress.jsonl",
    )
    worker = Worker(0, 0, 1, CPU, folder)
    return Profiler(worker, job, Context(workload, graph, CPU, 1, split.train), clock)


def test_without_time_the_least_is_measured_and_tells_every_coefficient(alone: None, tmp_path: Path) -> None:
    """Each look at the clock finds all of the usual budget gone: nobody asked for it, so the least is measured."""
    late = profiler(tmp_path, Clock(1.0, BUDGET_S[False]), None)
    late.measure_all()
    assert {len(sample.samples_s) for sample in late.compute} == {1}
    # Two depths at two sizes tell what a stage and what a layer takes, each a constant and a slope.
    for recompute in ("none", "full"):
        mine = [s for s in late.compute if (s.module, s.recompute) == ("layer", recompute)]
        assert {(s.num_layers, s.microbatch_size) for s in mine} == {(n, b) for n in (1, 2) for b in (1, BATCH)}
    assert {sample.targets for sample in late.host} == {1, BATCH}
    assert [sample.num_layers for sample in late.compute if sample.module == "optimizer"] == [1, 8]
    machine = examples.MACHINE.model_copy(update={"num_devices": 1})
    measured = {"compute": late.compute, "comm": late.comm, "host": late.host}
    found = fit(Profile.model_validate({"workload": late.job.workload, "machine": machine} | measured))
    predictor = Predictor(found, late.job.workload)
    for setting in predictor.settings(1, Pins()):
        assert predictor.forecast(setting, (3,)).step_s > 0


@pytest.mark.parametrize("gone_s", [1.0, BUDGET_S[False]])
def test_touched_rows_are_measured_where_there_is_a_table_and_nowhere_else(
    alone: None, tmp_path: Path, gone_s: float
) -> None:
    """Whether there is time for all or for the least alone, every plan's step is then known."""
    for embedding in ("features", "both"):
        found = profiler(tmp_path, Clock(gone_s, 0.0 if gone_s == 1.0 else gone_s), None, embedding)
        found.measure_all()
        touched = [sample for sample in found.compute if sample.pieces]
        workload = found.job.workload
        if embedding == "features":
            assert not touched
            continue
        table_rows = workload.parameters().table // workload.model.hidden_dim
        assert max(sample.rows for sample in touched) == table_rows
        assert len({(sample.rows, sample.pieces) for sample in touched}) == len(touched) == 4
        machine = examples.MACHINE.model_copy(update={"num_devices": 1})
        measured = {"compute": found.compute, "comm": found.comm, "host": found.host}
        predictor = Predictor(
            fit(Profile.model_validate({"workload": workload, "machine": machine} | measured)), workload
        )
        (setting, *_) = predictor.settings(1, Pins())
        first, layers = role_of(0, 1), np.array([3.0])
        assert predictor.tail_parts(setting, first, layers)["touched"][0] > 0


def test_a_slow_start_costs_a_budget_that_nobody_asked_for_no_measurements(tmp_path: Path) -> None:
    for start_s, limit_s in ((10.0, 180.0), (90.0, 180.0), (100.0, 190.0), (300.0, 390.0)):
        assert profiler(tmp_path, Clock(0.0, 0.0), None)._limit_s(start_s) == limit_s - ENDING_S
        assert profiler(tmp_path, Clock(0.0, 0.0), 60.0)._limit_s(start_s) == 60.0 - ENDING_S


@pytest.mark.parametrize(
    ("bytes_per_s", "most", "largest"),
    [
        (1e10, 2**22, 2**22),
        (1e10, 2**22 + 4, 2**22 + 4),
        (1e10, 2**26, 2**26),
        (1e10, 2**40, 2**28),
        (5e8, 2**40, 2**25),
        (1e7, 2**40, 2**22),
    ],
)
def test_sums_as_large_as_the_gradient_are_measured_unless_they_take_long(
    tmp_path: Path, bytes_per_s: float, most: int, largest: int
) -> None:
    def sample(size: int) -> CommSample:
        seconds = size / bytes_per_s
        return CommSample(
            op="all_reduce", axis="dp", group_size=2, link="host", message_bytes=size, time_s=seconds, samples_s=[]
        )

    made = profiler(tmp_path, Clock(0.0, 0.0), None)
    grid = Grid.of(64, 4, quick=False, largest=64)
    made._messages(grid, sample, least=False, most=most)
    assert max(each.message_bytes for each in made.comm) == largest
    made.comm.clear()
    made._messages(grid, sample, least=True, most=most)
    assert [each.message_bytes for each in made.comm] == [MESSAGE_BYTES[0], MESSAGE_BYTES[-1]]


def test_the_largest_sum_is_the_gradient_without_a_table(tmp_path: Path) -> None:
    made = profiler(tmp_path, Clock(0.0, 0.0), None)
    workload = made.job.workload
    features = workload.model_copy(update={"model": workload.model.model_copy(update={"embedding": "features"})})
    table = workload.model_copy(update={"model": workload.model.model_copy(update={"embedding": "both"})})
    sizes = []
    for each in (features, table):
        made.job = made.job.model_copy(update={"workload": each})
        sizes.append(made._gradient_bytes())
    assert sizes == 2 * [4 * features.parameters().of_model(features.model.num_layers)]


def test_progress_tells_seconds_gone_and_left(alone: None, tmp_path: Path) -> None:
    profiler(tmp_path, Clock(2.0, 0.5), 100.0).measure_all()
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["done"] for line in lines] == sorted(line["done"] for line in lines)
    assert all(line["total"] == line["done"] + line["left_s"] for line in lines)
    assert all(line["total"] <= 100.0 for line in lines)
    assert (lines[-1]["what"], lines[-1]["left_s"]) == ("done", 0.0)


def test_a_budget_too_small_for_the_least_says_what_is_needed(alone: None, tmp_path: Path) -> None:
    with pytest.raises(MgraphError, match=r"^--budget 10 is too little: .*--budget \d+$") as caught:
        profiler(tmp_path, Clock(9.0, 0.0), 10.0).measure_all()
    assert caught.value.exit_code == EXIT_USAGE
    needed = float(caught.value.message.rpartition(" ")[2])
    assert needed > 9.0 + ENDING_S
    enough = profiler(tmp_path, Clock(9.0, 0.0), 2 * needed)
    enough.measure_all()
    assert {sample.module for sample in enough.compute} == {"input", "layer", "last_layer", "head", "optimizer"}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Profile:
    """``mgraph profile --quick`` of a small model on the built-in graph with two workers."""
    folder = tmp_path_factory.mktemp("profile")
    sets = ["model.num_layers=3", "model.hidden_dim=8", "model.num_heads=2", "model.ffn_dim=8", "batch.batch_size=64"]
    command = [sys.executable, "-m", "megagraph_cli.cli", "profile", "--quick", "--dataset", "demo", "--gpus", "2"]
    command += ["--budget", "600"]  # however busy the host, nothing is left out
    command += [part for pair in sets for part in ("--set", pair)]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        cwd=folder,
        env=environment | {"MGRAPH_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Profile.load(folder / "profile.json")


def of_module(counts: ParameterCounts, sample: ComputeSample) -> int:
    """Parameters of what was measured; every probe holds the tokens' channels as a stage does."""
    own = {"input": counts.input, "head": counts.head, "last_layer": counts.layer}
    return counts.shared + own.get(sample.module, sample.num_layers * counts.layer)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_quick_profile_measures_every_module_at_every_size(profile: Profile) -> None:
    modules = {(s.module, s.num_layers) for s in profile.compute if s.module != "optimizer"}
    assert modules == {("layer", 1), ("layer", 2), ("last_layer", 1), ("input", 0), ("head", 0)}
    sizes = {(s.module, s.num_layers, s.microbatch_size) for s in profile.compute if s.module != "optimizer"}
    assert len(sizes) == len(modules) * len({s.microbatch_size for s in profile.compute if s.module != "optimizer"})
    assert {s.num_layers for s in profile.compute if s.module == "optimizer"} == {1, 2, 8}
    assert {s.op for s in profile.host} == {"construct", "gather"}
    assert {s.cp for s in profile.compute} == {1, 2}
    assert {(s.op, s.group_size) for s in profile.comm} == {("p2p", 2), ("all_reduce", 2), ("all_gather", 2)}
    assert all(s.time_s > 0 for s in profile.comm)
    assert profile.machine.num_devices == 2
    assert 0 < profile.machine.overhead_bytes < profile.machine.memory_bytes


@pytest.mark.ranks
@pytest.mark.slow
def test_times_are_positive_and_medians_of_what_was_sampled(profile: Profile) -> None:
    for sample in profile.compute:
        assert len(sample.samples_s) == 3
        assert sample.forward_s == sorted(pair[0] for pair in sample.samples_s)[1]
        assert sample.backward_s == sorted(pair[1] for pair in sample.samples_s)[1]
        assert sample.backward_s > 0
        assert (sample.forward_s > 0) == (sample.module != "optimizer")
    for host in profile.host:
        assert host.time_s > 0


@pytest.mark.ranks
@pytest.mark.slow
def test_memory_is_whole_and_consistent(profile: Profile) -> None:
    counts = profile.workload.parameters()
    itemsize = profile.workload.itemsize_bytes
    for sample in profile.compute:
        memory = sample.memory
        assert memory["parameters"] == of_module(counts, sample) * itemsize, sample.module
        if sample.module == "optimizer":
            assert memory.keys() == {"parameters", "backward_peak"}
            continue
        assert memory.keys() == {"parameters", "saved", "forward_peak", "backward_peak", "batch"}
        assert 0 < memory["saved"] <= memory["forward_peak"], sample
        assert memory["backward_peak"] >= 0
        assert (memory["batch"] > 0) == (sample.module != "head")
        if sample.module in ("input", "layer"):
            out_bytes = sample.microbatch_size * sample.rows * profile.workload.model.hidden_dim * itemsize
            assert memory["saved"] >= out_bytes, sample


@pytest.mark.ranks
@pytest.mark.slow
def test_what_a_layer_saves_grows_with_the_micro_batch_and_with_layers(profile: Profile) -> None:
    """Twice the sequences save twice the bytes, whatever their number; two layers save more than one."""
    saved = saved_by_layers(profile, "none")
    smallest, *_, top = sorted({size for _, size in saved})
    for layers in (1, 2):
        slope = (saved[layers, top] - saved[layers, smallest]) / (top - smallest)
        assert abs(saved[layers, top] / top - slope) <= 0.01 * slope
    assert saved[2, top] > saved[1, top]


def saved_by_layers(profile: Profile, recompute: str) -> dict[tuple[int, int], int]:
    """Saved bytes of a whole sequence's layers by (layers in a row, micro-batch)."""
    layers = [s for s in profile.compute if s.module == "layer" and s.cp == 1 and s.recompute == recompute]
    return {(s.num_layers, s.microbatch_size): s.memory["saved"] for s in layers}


@pytest.mark.ranks
@pytest.mark.slow
def test_every_way_to_run_layers_is_measured_at_every_context_degree(profile: Profile) -> None:
    found = {(s.module, s.cp, s.recompute, s.context) for s in profile.compute}
    for cp in (1, 2):
        contexts = ("ring", "allgather") if cp == 2 else ("ring",)
        assert {f for f in found if f[:2] == ("layer", cp)} == {
            ("layer", cp, recompute, context) for recompute in ("none", "full") for context in contexts
        }
        assert {f for f in found if f[:2] == ("last_layer", cp)} == {
            ("last_layer", cp, recompute, "ring") for recompute in ("none", "full")
        }
    assert {f[2:] for f in found if f[0] in ("input", "head", "optimizer")} == {("none", "ring")}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_layer_that_runs_again_saves_its_input_alone(profile: Profile) -> None:
    """One more layer in a row saves one more x [b, R, D], where a layer that keeps everything saves many times that."""
    plain, again = saved_by_layers(profile, "none"), saved_by_layers(profile, "full")
    x_bytes = profile.workload.batch.rows().rows_per_rank * profile.workload.model.hidden_dim * 4
    for size in {size for _, size in again}:
        # A checkpoint has a tensor of a few bytes of its own.
        assert 0 <= again[2, size] - again[1, size] - size * x_bytes <= 64
        assert plain[2, size] - plain[1, size] > 5 * size * x_bytes
