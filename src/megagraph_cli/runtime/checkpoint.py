"""Checkpoints by global parameter name, so that any plan can go on from what another wrote.

A checkpoint is a folder: one ``part-<stage>.pt`` for each stage and ``state.json``. It is written aside and
renamed, so a folder under its final name is whole.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from megagraph_cli.artifacts.base import digest_of, first_complaint
from megagraph_cli.artifacts.run import EpochRecord
from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.parallel.adamw import MOMENTS
from megagraph_cli.runtime.build import SHARED_PARAMETERS, TABLE
from megagraph_cli.runtime.hostfiles import HostFiles
from megagraph_cli.runtime.step import TrainStep

_KEPT = 2
ON_ONE_HOST = HostFiles()


class TrainState(BaseModel):
    """Where training stands, plan-independent: positions are in global targets and optimizer steps."""

    model_config = ConfigDict(extra="forbid")

    workload_digest: str
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 1
    """The epoch in progress, from 1."""
    targets_done: int = 0
    """Targets of that epoch already trained on."""
    loss_sum: float = 0.0
    """Sum over its steps of loss x targets."""
    epoch_s: float = 0.0
    stall_s: float = 0.0
    """Seconds that the epoch's steps took so far, and of these the wait for batches."""
    sampling_weights: list[float]
    sampling_log_weights: list[float] = [0.0, 0.0, 0.0, 0.0]
    """p of the epoch in progress, and the log w that the next update goes on from."""
    epochs: list[EpochRecord] = []
    best_epoch: int | None = None
    best_step: int | None = None


def workload_digest(workload: Workload, graph_digest: str) -> str:
    """What a resumed run must share with its checkpoint: the graph, and all of the recipe but the epochs."""
    recipe = workload.recipe().model_dump(mode="json")
    recipe["train"].pop("epochs")
    return digest_of(recipe | {"graph": graph_digest})


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:09d}"


def save_checkpoint(run_dir: Path, state: TrainState, train: TrainStep, files: HostFiles = ON_ONE_HOST) -> None:
    """Write a checkpoint; every rank calls it, one rank of each stage writes, and host 0 gets and keeps all parts.

    Where that step's checkpoint exists its tensors are these, whichever plan wrote them: only its state is replaced.
    """
    final = checkpoint_path(run_dir, state.step)
    if files.agreed(final.exists()):
        dist.barrier()
        if dist.get_rank() == 0:
            _write_state(final, state)
            _prune(run_dir, state)
        dist.barrier()
        return
    aside = final.with_name(f".{final.name}.part")
    mesh = train.parts.mesh
    leader = dist.get_rank() == 0
    if files.leads:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    if mesh.place.dp == 0 and mesh.place.cp == 0:
        torch.save(_own_tensors(train), aside / f"part-{mesh.place.pp}.pt")
    dist.barrier()
    files.collect(aside)
    if leader:
        _write_state(aside, state)
        aside.rename(final)
        _prune(run_dir, state)
    dist.barrier()


def _write_state(folder: Path, state: TrainState) -> None:
    part = folder / ".state.json.part"
    part.write_text(state.model_dump_json(indent=2), encoding="utf-8")
    part.replace(folder / "state.json")


def _own_tensors(train: TrainStep) -> dict[str, dict[str, Tensor]]:
    """Parameters and moments of this stage by global name; a shared parameter is written by the first stage only."""
    mesh = train.parts.mesh
    names = [name for name in train.parameters if mesh.place.pp == 0 or name not in SHARED_PARAMETERS]
    out: dict[str, dict[str, Tensor]] = {"parameters": {}, **{moment: {} for moment in MOMENTS}}
    for name in names:
        parameter = train.parameters[name]
        out["parameters"][name] = parameter.detach()
        if name == TABLE:
            continue
        for moment in MOMENTS:
            out[moment][name] = train.optimizer.moments[moment][name]
    if train.row_optimizer is not None:
        for moment, state in train.row_optimizer.state().items():
            out.setdefault(moment, {})[TABLE] = state
    return out


def _prune(run_dir: Path, state: TrainState) -> None:
    """Keep the last two checkpoints and the best."""
    folders = whole_checkpoints(run_dir)
    best = checkpoint_path(run_dir, state.best_step) if state.best_step is not None else None
    for folder in folders[:-_KEPT]:
        if folder != best:
            shutil.rmtree(folder)


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of whole checkpoints, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"))


def load_state(folder: Path, workload_digest: str) -> TrainState:
    """The training state of a checkpoint; another workload is a mismatch (exit 4)."""
    try:
        state = TrainState.model_validate(json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        reason = first_complaint(error) if isinstance(error, ValidationError) else str(error)
        raise MgraphError(
            f"checkpoint file {folder / 'state.json'} is damaged ({reason}); remove its folder to resume earlier"
        ) from error
    if state.workload_digest != workload_digest:
        raise MgraphError(
            f"{folder.parent.parent} was trained on another workload than this plan's; resume with its own plan.json",
            EXIT_STALE,
        )
    return state


def load_tensors(folder: Path, train: TrainStep, *, optimizer: bool) -> None:
    """Fill this rank's parameters (and moments) from whichever parts hold them; only what is needed is read."""
    wanted = set(train.parameters)
    for part in sorted(folder.glob("part-*.pt")):
        held = _read_part(part)
        for name in wanted & held["parameters"].keys():
            parameter = train.parameters[name]
            with torch.no_grad():
                parameter.copy_(held["parameters"][name])
            if optimizer and name == TABLE:
                _load_rows(train, held, part)
            elif optimizer:
                for moment in MOMENTS:
                    train.optimizer.moments[moment][name].copy_(held[moment][name])
        wanted -= held["parameters"].keys()
    if wanted:
        raise MgraphError(
            f"checkpoint {folder} lacks {sorted(wanted)[0]}; it was written for another model", EXIT_STALE
        )


def _load_rows(train: TrainStep, held: dict[str, Any], part: Path) -> None:
    """The table's moments, and how often each of its rows was updated."""
    assert train.row_optimizer is not None
    for name, state in train.row_optimizer.state().items():
        if TABLE not in held.get(name, {}):
            raise _damaged(part, f"it has no {name} of the table")
        state.copy_(held[name][TABLE])


def set_optimizer_step(train: TrainStep, step: int) -> None:
    """Dense parameters have made every step; the table's are counted by row and were loaded."""
    train.optimizer.set_steps(step)


def _read_part(path: Path) -> dict[str, Any]:
    try:
        held: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        missing = [group for group in ("parameters", *MOMENTS) if group not in held]
    except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise _damaged(path, "it cannot be read") from error
    if missing:
        raise _damaged(path, f"it has no {missing[0]}")
    return held


def _damaged(path: Path, why: str) -> MgraphError:
    return MgraphError(f"checkpoint file {path} is damaged ({why}); remove its folder to resume earlier")
