"""Runs plans on the ranks of one process group: workers stay up between plans."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.commands.workloads import workload_of
from megagraph_cli.graph.batch import epoch_order, replica_targets
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.prepare import open_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.batches import microbatch_targets
from megagraph_cli.layout.dims import AXES
from megagraph_cli.model import attention
from megagraph_cli.parallel.data import GradientBuffer
from megagraph_cli.parallel.mesh import Mesh, build_mesh
from megagraph_cli.runtime import build
from megagraph_cli.runtime.evaluate import predict
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device
from tests.parity.cases import STEPS, Case, recipe


@dataclass(frozen=True)
class Outcome:
    """Losses and gradient norms of every step, all gradients after step 1 by name, class predictions at the end."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, NDArray[Any]]
    predictions: NDArray[np.float64]


def run_cases(rank: int, graph_path: Path, dataset: str, cases: list[Case]) -> list[Outcome | None]:
    """Each case in turn on all ranks; rank 0 has the outcomes. Plans of the same degrees share their groups."""
    graph = open_graph(graph_path)
    meshes = {dims: build_mesh(dims, AXES, "cpu") for dims in dict.fromkeys(case.order.dims for case in cases)}
    return [_run_case(rank, graph, dataset, case, meshes[case.order.dims]) for case in cases]


def _run_case(rank: int, graph: Graph, dataset: str, case: Case, mesh: Mesh) -> Outcome | None:
    chosen = recipe(dataset, case)
    split = make_split(graph, chosen.dataset.split, chosen.dataset.split_seed)
    workload = workload_of(chosen, graph, split)
    size = microbatch_targets(workload.batch.batch_size, case.order.dims.dp, case.order.num_microbatches)
    with _broken(case.broken, mesh.place.dp):
        parts = build.build_stage(
            case.order, workload, graph, mesh, torch.device("cpu"), threads=1, microbatch_size=size
        )
        return _train(rank, TrainStep(parts), workload, split.train, split.test[:50])


def _train(
    rank: int, train: TrainStep, workload: Workload, targets: NDArray[np.int64], test: NDArray[np.int64]
) -> Outcome | None:
    parts = train.parts
    batch_size = workload.batch.batch_size
    order = epoch_order(targets, workload.train.rng_seed, 1)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        chosen = order[step * batch_size : (step + 1) * batch_size]
        share = replica_targets(
            chosen, batch_size, parts.mesh.dims.dp, parts.mesh.place.dp, parts.order.num_microbatches
        )
        batch = [to_device(part, parts.device) for part in parts.builder.build(share, epoch=1, view=0)]
        if step == 0:
            with mock.patch.object(train, "apply", _keep_gradients(train, gradients)):
                summary = train.run(batch, step=step, num_targets=chosen.size, lr=workload.train.lr)
        else:
            summary = train.run(batch, step=step, num_targets=chosen.size, lr=workload.train.lr)
        losses.append(float(summary[0]))
        norms.append(float(summary[1]))
    # Class predictions are compared in float64 alone.
    predictions = predict(parts, test if workload.train.dtype == "float64" else test[:0], batch_size)
    assert predictions is not None
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradients if parts.mesh.place.dp == parts.mesh.place.cp == 0 else {})
    if rank:
        return None
    whole = {name: grad for part in gathered for name, grad in part.items()}
    return Outcome(losses, norms, whole, predictions.numpy())


def _keep_gradients(train: TrainStep, into: dict[str, NDArray[Any]]) -> Any:
    """Gradients as they come out of the reductions, before clipping."""
    apply = train.apply

    def keep(norm: torch.Tensor, lr: float) -> None:
        into.update({name: p.grad.clone().numpy() for name, p in train.dense.items() if p.grad is not None})
        if train.table is not None:
            into[build.TABLE] = train.table.dense().numpy()
        apply(norm, lr)

    return keep


def _broken(fault: str | None, dp_rank: int) -> Any:
    """Three backends broken on purpose: what parity must notice."""
    if fault is None:
        return nullcontext()
    if fault == "columns":  # K/V travel, the bias columns stay
        block_of = attention.block_of

        def own_columns(bias: Any, owner: int, drop: Any) -> Any:
            return replace(block_of(bias, owner, drop), features=bias.features[bias.cp_rank])

        return mock.patch.object(build, "block_of", own_columns)
    reduce = GradientBuffer.reduce
    if fault == "tokens":  # the global tokens' gradient stays within each stage

        def without_pipeline(self: GradientBuffer) -> None:
            kept, self.shared = self.shared, self.shared[:0]
            reduce(self)
            self.shared = kept

        return mock.patch.object(GradientBuffer, "reduce", without_pipeline)
    assert fault == "doubled"  # one replica counts twice

    def doubled(self: GradientBuffer) -> None:
        if dp_rank == 1:
            self.flat.mul_(2)
        reduce(self)

    # Nothing may leave before it is doubled.
    return mock.patch.multiple(GradientBuffer, reduce=doubled, expect_last=lambda _self: None)
