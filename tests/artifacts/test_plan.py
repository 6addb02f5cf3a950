"""A plan's order must add up; one written by hand needs little, one with a forecast its digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError
from tests.artifacts import examples


def written(values: dict[str, Any], folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_the_least_hand_written_plan_gets_defaults(tmp_path: Path) -> None:
    plan = Plan.load(written(examples.hand_written_plan(), tmp_path))
    assert (plan.hosts, plan.device, plan.predicted, plan.digest) == (1, None, None, None)
    assert (plan.mesh_order, plan.schedule, plan.recompute, plan.context) == (
        ["pp", "dp", "cp"],
        "gpipe",
        "none",
        "ring",
    )


@pytest.mark.parametrize("key", ["schema", "gpus", "workload", "dims", "layers_per_stage", "num_microbatches"])
def test_each_of_the_least_keys_is_needed(key: str, tmp_path: Path) -> None:
    values = examples.hand_written_plan()
    values.pop(key)
    with pytest.raises(MgraphError, match=key) as caught:
        Plan.load(written(values, tmp_path))
    assert caught.value.exit_code == (EXIT_STALE if key == "schema" else EXIT_USAGE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers_per_stage": [2, 1]}, "adds up to 3"),
        ({"layers_per_stage": [4, 0]}, "without a layer"),
        ({"layers_per_stage": [4]}, "1 entries"),
        ({"layers_per_stage": []}, "layers_per_stage"),
        ({"gpus": 3}, "gpus says 3"),
        ({"dims": {"pp": 3, "dp": 1, "cp": 1}}, "3 workers"),
        ({"dims": {"pp": 0, "dp": 2, "cp": 1}}, "dims.pp"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"num_microbatches": 4096}, "more than batch_size"),
        ({"schedule": "1f1b", "num_microbatches": 1}, "1f1b"),
        ({"schedule": "zigzag"}, "schedule"),
        ({"mesh_order": ["pp", "dp", "dp"]}, "mesh_order"),
        ({"gpus": 1, "dims": {"pp": 1, "dp": 1, "cp": 1}, "layers_per_stage": [4], "schedule": "1f1b"}, "gpipe"),
        ({"gpus": 18, "dims": {"pp": 1, "dp": 1, "cp": 18}, "layers_per_stage": [4]}, "sequences of 17 rows"),
        ({"recompute": "some"}, "recompute"),
        ({"context": "star"}, "context"),
        ({"comment": "mine"}, "comment"),
    ],
)
def test_an_order_that_cannot_be_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(MgraphError, match=named) as caught:
        Plan.load(written(examples.hand_written_plan() | changes, tmp_path))
    assert caught.value.exit_code == EXIT_USAGE


def test_a_forecast_without_a_digest_is_refused(tmp_path: Path) -> None:
    examples.plan().save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    values.pop("digest")
    with pytest.raises(MgraphError, match="digest") as caught:
        Plan.load(written(values, tmp_path))
    assert caught.value.exit_code == EXIT_STALE
    assert Plan.load(written(values, tmp_path), force=True).predicted is not None


def test_a_plan_of_before_threads_were_kept_is_whole(tmp_path: Path) -> None:
    saved = examples.plan().save(tmp_path / "plan.json")
    assert "threads" not in json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert Plan.load(tmp_path / "plan.json") == saved
    assert saved.threads is None
    with_threads = saved.model_copy(update={"threads": 3}).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").threads == with_threads.order()["threads"] == 3


def test_the_order_is_apart_from_the_forecast() -> None:
    assert set(examples.plan().order()) == {
        "gpus",
        "hosts",
        "device",
        "memory_limit_bytes",
        "workload",
        "dims",
        "mesh_order",
        "layers_per_stage",
        "num_microbatches",
        "schedule",
        "recompute",
        "context",
    }
