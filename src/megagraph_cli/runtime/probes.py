"""What the profile measures on one rank: the stage, ring and optimizer objects that training runs, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.graph.graph import Graph
from megagraph_cli.layout.dims import AXES, ParallelDims, Place
from megagraph_cli.model.drop import Drop
from megagraph_cli.model.head import Head
from megagraph_cli.model.transformer import Stage
from megagraph_cli.parallel.mesh import Mesh
from megagraph_cli.parallel.pipeline import SingleStage
from megagraph_cli.runtime.build import (
    Order,
    StageParts,
    StageRunner,
    make_attend,
    make_builder,
    model_shape,
    parameter_dtype,
    wide,
)
from megagraph_cli.runtime.grid import PLAIN, Way
from megagraph_cli.runtime.spare import Fragmentation
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import DeviceBatch, to_device


@dataclass(frozen=True)
class Context:
    """What all probes of a profile share."""

    workload: Workload
    graph: Graph
    device: torch.device
    threads: int
    train_targets: NDArray[np.int64]
    fragmentation: Fragmentation = field(default_factory=Fragmentation)

    def targets_of(self, count: int) -> NDArray[np.int64]:
        """``count`` training targets, from the start again where there are fewer."""
        return np.resize(self.train_targets, count)


def context_mesh(group: dist.ProcessGroup) -> Mesh:
    """A mesh of context ranks alone, over the ranks of ``group``."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return Mesh(dims=ParallelDims(1, 1, size), place=Place(0, 0, rank), pp=group, cp=group, loss=group)


class Probe:
    """A stage of some layers, with or without input and head, that can be driven forward and backward.

    ``kind`` is a module of profile.json; ``num_layers`` middle layers in a row for ``layer`` and ``optimizer``.
    ``way`` is how its layers run.
    """

    def __init__(self, context: Context, mesh: Mesh, kind: str, num_layers: int, way: Way = PLAIN) -> None:
        self.kind, self.num_layers, self.mesh, self.way = kind, num_layers, mesh, way
        self.context = context
        stage = self._stage()
        self.layout = context.workload.batch.rows(mesh.dims.cp)
        runner = StageRunner(stage, context.workload, self.layout, mesh)
        order = Order(mesh.dims, AXES, [max(1, num_layers)], 1, "gpipe")
        builder = make_builder(context.workload, context.graph, mesh, 1, 1, context.threads)
        self.parts = StageParts(
            runner, SingleStage(runner, 1, runner.loss), builder, mesh, order, context.workload, context.device
        )
        self.train = TrainStep(self.parts)
        self.inputs: Tensor | None = None
        self._gradient: Tensor | None = None
        runner.train()

    def _stage(self) -> Stage:
        """Only the parts that ``kind`` measures; the model has one layer more than a run of middle layers."""
        shape = model_shape(self.context.workload)
        layers = self.num_layers if self.kind in ("layer", "optimizer") else int(self.kind == "last_layer")
        shape = replace(shape, num_layers=1 if self.kind == "last_layer" else layers + 1)
        stage = Stage(
            shape,
            range(layers),
            make_attend(self.mesh, self.way.context),
            first=self.kind == "input",
            last=False,
            recompute=self.way.recompute == "full",
        )
        if self.kind == "head":
            stage.head = Head(shape.layer.hidden_dim, shape.num_classes)
        stage = stage.to(parameter_dtype(self.context.workload))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
        return stage.to(self.context.device)

    @property
    def parameters_bytes(self) -> int:
        """Bytes of the measured module's weights; the shared token bias counts as the stage's."""
        return sum(p.numel() * p.element_size() for p in self.train.parameters.values())

    def load(self, microbatch_size: int) -> int:
        """Put a real micro-batch in place; returns the bytes of its tensors that this kind reads."""
        targets = self.context.targets_of(microbatch_size)
        builder = replace(self.parts.builder, microbatch_size=microbatch_size)
        if self.kind != "input":
            builder = replace(builder, input_layout=None)
        (batch,) = builder.build(targets, epoch=1, view=0)
        device_batch = to_device(batch, self.context.device)
        runner = self.parts.runner
        runner.denominator = float(microbatch_size)
        rows = 1 if self.kind == "head" else self.layout.rows_per_rank
        shape = (microbatch_size, rows, self.context.workload.model.hidden_dim)
        dtype = parameter_dtype(self.context.workload)
        self.inputs = torch.zeros(shape, dtype=dtype, device=self.context.device).normal_().requires_grad_()
        runner.inbox = [device_batch]
        self._gradient = None
        return batch_bytes(device_batch, self.kind)

    def unload(self) -> None:
        """Let go of the micro-batch and of what was made of it."""
        self.inputs = self._gradient = None
        self.parts.runner.inbox = ()
        if self.train.table is not None:
            self.train.table.forget()

    def forward(self) -> Tensor:
        """One micro-batch forward, its bias channels built for the layer kinds, its loss for the head."""
        runner, index = self.parts.runner, torch.zeros(1, dtype=torch.int64)
        assert self.inputs is not None
        if self.kind in ("layer", "last_layer"):
            output: Tensor = runner(self.inputs, index)
            return output
        with runner.autocast(self.context.device):
            return self._end(runner.stage, index)

    def _end(self, stage: Stage, index: Tensor) -> Tensor:
        """The input layer alone, or the head and its loss."""
        if self.kind == "input":
            assert stage.embedding is not None
            rate = self.context.workload.model.input_dropout
            out: Tensor = stage.embedding(self.parts.runner.inbox[0].nodes, Drop(rate, 0) if rate else None)
            return out
        assert stage.head is not None
        return self.parts.runner.loss(wide(stage.head(self.inputs)), index)

    def backward(self, out: Tensor) -> None:
        if self._gradient is None or self._gradient.shape != out.shape:
            self._gradient = torch.ones_like(out)
        out.backward(self._gradient)  # type: ignore[no-untyped-call]
        assert self.inputs is not None
        self.inputs.grad = None
        if self.train.table is not None:
            self.train.table.forget()

    def optimize(self) -> None:
        """What follows a step's reductions: norm, clipping, update, and zeroed gradients."""
        norm = self.train.gradients.square_sum().sqrt()
        self.train.apply(norm, lr=1e-4)
        self.train.gradients.zero()


def batch_bytes(batch: DeviceBatch, kind: str) -> int:
    """Bytes of a micro-batch's tensors: node inputs for ``input``, topology and labels for the layers."""
    if kind == "head":
        return 0
    holders = [batch.nodes] if kind == "input" else [batch.topology, batch]
    tensors = [t for holder in holders for t in vars(holder).values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
