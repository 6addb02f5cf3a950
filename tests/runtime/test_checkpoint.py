"""Checkpoints: whole or not there, which are kept, and what is said of those that cannot be used."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError
from megagraph_cli.runtime import checkpoint
from megagraph_cli.runtime.checkpoint import (
    TrainState,
    checkpoint_path,
    load_state,
    load_tensors,
    save_checkpoint,
    set_optimizer_step,
    whole_checkpoints,
)
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device
from tests.runtime.small import BATCH, CPU, make_parts, make_plan, small_graph, small_workload

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def train() -> TrainStep:
    """A small model after one step."""
    graph = small_graph()
    step = TrainStep(make_parts(make_plan(small_workload(graph)), graph))
    take_steps(step, 1)
    return step


def take_steps(train: TrainStep, count: int) -> None:
    (batch,) = train.parts.builder.build(torch.arange(BATCH).numpy(), epoch=1, view=0)
    for step in range(count):
        train.run([to_device(batch, CPU)], step=step, num_targets=BATCH, lr=0.01)


def state_at(step: int, **changes: Any) -> TrainState:
    return TrainState(workload_digest="mine", step=step, sampling_weights=[0.25] * 4, **changes)


def snapshot(train: TrainStep) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and all optimizer state by name."""
    return {
        name: {"value": p.detach().clone(), **{m: held[name].clone() for m, held in train.optimizer.moments.items()}}
        for name, p in train.parameters.items()
    }


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_loaded_is_what_was_saved_to_the_last_bit(train: TrainStep, tmp_path: Path) -> None:
    saved = snapshot(train)
    state = state_at(1, loss_sum=0.1 + 0.2, best_epoch=3, best_step=1, targets_done=8)
    save_checkpoint(tmp_path, state, train)
    folder = checkpoint_path(tmp_path, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["part-0.pt", "state.json"]
    take_steps(train, 2)
    assert load_state(folder, "mine") == state
    load_tensors(folder, train, optimizer=True)
    set_optimizer_step(train, 1)
    for name, held in snapshot(train).items():
        assert held.keys() == saved[name].keys()
        for key, value in held.items():
            assert torch.equal(value, saved[name][key]), (name, key)


def test_parameters_alone_can_be_loaded(train: TrainStep, tmp_path: Path) -> None:
    saved = snapshot(train)
    save_checkpoint(tmp_path, state_at(1), train)
    take_steps(train, 1)
    later = snapshot(train)
    load_tensors(checkpoint_path(tmp_path, 1), train, optimizer=False)
    for name, held in snapshot(train).items():
        assert torch.equal(held["value"], saved[name]["value"])
        assert torch.equal(held["exp_avg"], later[name]["exp_avg"])


def test_a_run_that_took_no_step_can_be_saved_and_goes_on(tmp_path: Path) -> None:
    graph = small_graph()
    fresh, other = (TrainStep(make_parts(make_plan(small_workload(graph)), graph)) for _ in range(2))
    save_checkpoint(tmp_path, state_at(0), fresh)
    load_tensors(checkpoint_path(tmp_path, 0), other, optimizer=True)
    set_optimizer_step(other, 0)
    take_steps(fresh, 2)
    take_steps(other, 2)
    for name, held in snapshot(fresh).items():
        assert torch.equal(held["value"], snapshot(other)[name]["value"]), name


@pytest.mark.parametrize("what", ["tensors", "state"])
def test_a_checkpoint_that_could_not_be_written_is_not_there(
    what: str, train: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state_at(1), train)

    def full(*_arguments: Any, **_named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        if what == "tensors":
            broken.setattr(checkpoint.torch, "save", full)
        else:
            broken.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, state_at(2), train)
    assert whole_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]
    save_checkpoint(tmp_path, state_at(2), train)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_the_last_two_and_the_best_are_kept(train: TrainStep, tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, state_at(step, best_step=2 if step >= 2 else None), train)
    assert names(tmp_path) == ["step-000000002", "step-000000004", "step-000000005"]
    save_checkpoint(tmp_path, state_at(6, best_step=6), train)
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


def test_another_workload_exits_4(train: TrainStep, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(1), train)
    with pytest.raises(MgraphError, match="another workload") as caught:
        load_state(checkpoint_path(tmp_path, 1), "theirs")
    assert caught.value.exit_code == EXIT_STALE


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"step": 1}'])
def test_a_damaged_state_names_the_checkpoint(text: str | None, tmp_path: Path) -> None:
    folder = checkpoint_path(tmp_path, 1)
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(MgraphError, match=r"step-000000001/state\.json is damaged .*; remove its folder") as caught:
        load_state(folder, "mine")
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in caught.value.message


class Hostile:
    """Would make a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


def _empty(part: Path) -> None:
    part.write_bytes(b"")


def _garbage(part: Path) -> None:
    part.write_bytes(b"not a checkpoint" * 100)


def _cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])


def _pickle(part: Path) -> None:
    part.write_bytes(pickle.dumps({"parameters": {}}))


def _hostile(part: Path) -> None:
    torch.save({"parameters": Hostile(str(part.with_name("ran")))}, part)


def _other_dict(part: Path) -> None:
    torch.save({"weights": {}}, part)


def _folder(part: Path) -> None:
    part.unlink()
    part.mkdir()


@pytest.mark.parametrize("damage", [_empty, _garbage, _cut, _pickle, _hostile, _other_dict, _folder])
def test_a_damaged_part_is_named_and_runs_nothing(
    damage: Callable[[Path], None], train: TrainStep, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, state_at(1), train)
    folder = checkpoint_path(tmp_path, 1)
    damage(folder / "part-0.pt")
    with pytest.raises(MgraphError, match=r"part-0\.pt is damaged") as caught:
        load_tensors(folder, train, optimizer=True)
    assert caught.value.exit_code == EXIT_USAGE
    assert not (folder / "ran").exists()


def test_a_parameter_that_no_part_holds_is_named(train: TrainStep, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(1), train)
    folder = checkpoint_path(tmp_path, 1)
    held = torch.load(folder / "part-0.pt", weights_only=True)
    held["parameters"].pop("layers.1.up.weight")
    torch.save(held, folder / "part-0.pt")
    with pytest.raises(MgraphError, match=r"lacks layers\.1\.up\.weight") as caught:
        load_tensors(folder, train, optimizer=True)
    assert caught.value.exit_code == EXIT_STALE


def test_a_folder_that_was_being_written_is_not_taken_for_a_checkpoint(train: TrainStep, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(3), train)
    folder = checkpoint_path(tmp_path, 3)
    shutil.copytree(folder, folder.with_name(".step-000000004.part"))
    assert whole_checkpoints(tmp_path) == [folder]
