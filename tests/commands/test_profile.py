"""``mgraph profile`` around its workers: what they are told, what is saved, what is left after a failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megagraph_cli import recipes
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.commands import devices, profile
from megagraph_cli.commands.profile import ProfileRequest
from megagraph_cli.commands.workloads import Folders, prepare
from megagraph_cli.console import Screen
from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.failures import WorkerFailed

TESTS = Path(__file__).parents[1]


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.getbasetemp() / "no-data", tmp_path_factory.getbasetemp() / "cache")


def request_for(folders: Folders, monkeypatch: pytest.MonkeyPatch, *sets: str, gpus: int = 2) -> ProfileRequest:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    return ProfileRequest(recipes.resolve("demo", None, sets), folders, "cpu", gpus, worker="commands_worker")


@pytest.mark.ranks
def test_rank_0s_profile_is_saved_with_the_graphs_facts(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(folders, monkeypatch, "model.num_layers=2")
    profile.run(request, tmp_path / "profile.json", Screen.stderr())
    saved = Profile.load(tmp_path / "profile.json")
    graph, split = prepare(request.recipe.dataset, folders, Screen.stderr())
    info = saved.workload.graph
    assert info is not None
    assert (info.digest, info.nodes, info.train) == (graph.digest, graph.num_nodes, split.train.size)
    assert saved.workload.recipe() == request.recipe
    assert saved.machine.num_devices == 2


@pytest.mark.ranks
def test_a_failure_names_rank_and_a_log_that_is_still_there(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .*planted") as caught:
        profile.run(request_for(folders, monkeypatch, "train.rng_seed=1"), tmp_path / "p.json", Screen.stderr())
    assert Path(caught.value.message.rpartition(" ")[2]).read_text(encoding="utf-8") == "planted"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in (tmp_path, tmp_path / "none" / "p.json"):
        with pytest.raises(MgraphError, match="--out") as caught:
            profile.run(request_for(folders, monkeypatch), out, Screen.stderr())
        assert caught.value.exit_code == EXIT_USAGE


def test_workers_are_counted_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 4)
    assert devices.count_workers("cpu", None) == 2
    assert devices.count_workers("cpu", 64) == 64
    assert devices.count_workers("cuda", None) == 4
    assert devices.choose_device("auto") == "cuda"
    for device, asked, named in (("cpu", 65, "64"), ("cuda", 5, "this machine has 4")):
        with pytest.raises(MgraphError, match=named) as caught:
            devices.count_workers(device, asked)
        assert caught.value.exit_code == EXIT_USAGE


def test_auto_is_cpu_and_cuda_is_refused_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 0)
    assert devices.choose_device("auto") == "cpu"
    with pytest.raises(MgraphError, match="no cuda device"):
        devices.choose_device("cuda")
