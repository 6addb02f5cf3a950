"""A graph of 60 nodes, a model of 3 small layers in float64, and one rank's stage and trainer for any plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import Recipe, Workload
from megagraph_cli.commands.workloads import workload_of
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.batches import microbatch_targets
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.runtime.build import Order, StageParts, build_stage
from megagraph_cli.runtime.job import TrainJob
from megagraph_cli.runtime.train import Trainer
from tests.graph.tiny import random_graph

CPU = torch.device("cpu")
LAYERS = 3
BATCH = 8

RECIPE: dict[str, dict[str, Any]] = {
    "dataset": {"name": "tiny", "split": "random:0.6,0.2,0.2"},
    "model": {
        "num_layers": LAYERS,
        "num_heads": 2,
        "hidden_dim": 8,
        "ffn_dim": 6,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "input_dropout": 0.0,
        "bias_powers": 3,
        "bias_init_std": 1.0,
    },
    "batch": {"batch_size": BATCH, "num_sampled": 5, "num_super": 1, "num_global": 1},
    "train": {"epochs": 4, "lr": 0.01, "end_lr": 0.0, "warmup_epochs": 0.5, "grad_clip": 1.0, "dtype": "float64"},
}


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def small_graph() -> Graph:
    graph = random_graph("sparse", num_nodes=60, seed=3)
    labels = np.random.default_rng(5).integers(0, 3, graph.num_nodes)
    return replace(graph, labels=labels, num_classes=3)


def small_workload(graph: Graph, **changes: dict[str, Any]) -> Workload:
    """The recipe above with changes by section, on ``graph``: 36 training targets, 12 to validate, 12 to test."""
    recipe = Recipe.model_validate({name: values | changes.get(name, {}) for name, values in RECIPE.items()})
    return workload_of(recipe, graph, make_split(graph, recipe.dataset.split, recipe.dataset.split_seed))


def make_plan(
    workload: Workload, *, pp: int = 1, dp: int = 1, cp: int = 1, layers: Sequence[int] = (LAYERS,), **changes: Any
) -> Plan:
    values = {
        "schema": "mgraph.plan/1",
        "gpus": pp * dp * cp,
        "workload": workload.model_dump(mode="json"),
        "dims": {"pp": pp, "dp": dp, "cp": cp},
        "layers_per_stage": list(layers),
        "num_microbatches": 1,
    }
    return Plan.model_validate(values | changes)


def make_parts(plan: Plan, graph: Graph) -> StageParts:
    """This rank's stage; all ranks of the world call it together."""
    dims = plan.dims.parallel()
    return build_stage(
        Order.of(plan),
        plan.workload,
        graph,
        build_mesh(dims, plan.mesh_order, "cpu"),
        CPU,
        threads=1,
        microbatch_size=microbatch_targets(plan.workload.batch.batch_size, dims.dp, plan.num_microbatches),
    )


def make_trainer(rank: int, run_dir: Path, plan: Plan, graph: Graph, *, max_steps: int | None = None) -> Trainer:
    """A trainer whose run directory exists and holds the plan."""
    if rank == 0:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        plan.save(run_dir / "plan.json")
    assert plan.workload.graph is not None
    job = TrainJob(
        graph_path=Path(),
        device="cpu",
        threads=1,
        launcher_pid=0,
        plan=run_dir / "plan.json",
        run_dir=run_dir,
        graph=plan.workload.graph,
        epochs=None,
        max_steps=max_steps,
        resume=False,
        stop_file=run_dir / "stop",
    )
    return Trainer(job, plan, graph, make_parts(plan, graph), rank)
