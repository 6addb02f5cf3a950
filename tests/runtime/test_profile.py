"""The profile: which sizes it takes, and that what it measured is whole and consistent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megagraph_cli.artifacts.profile import ComputeSample, Profile
from megagraph_cli.layout.parameters import ParameterCounts
from megagraph_cli.runtime.profile import MESSAGE_BYTES, Grid


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


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Profile:
    """``mgraph profile --quick`` of a small model on the built-in graph with two workers."""
    folder = tmp_path_factory.mktemp("profile")
    sets = ["model.num_layers=3", "model.hidden_dim=8", "model.num_heads=2", "model.ffn_dim=8", "batch.batch_size=64"]
    command = [sys.executable, "-m", "megagraph_cli.cli", "profile", "--quick", "--dataset", "demo", "--gpus", "2"]
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
