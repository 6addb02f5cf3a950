"""The wiring diagram: a plan, a graph and a rank -> this rank's stage, its pipeline and its gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import Workload, embedding_inputs
from megagraph_cli.graph.batch import IGNORED_LABEL, BatchBuilder, SequenceSpec
from megagraph_cli.graph.graph import Graph
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import Attend, BiasWeights, BlockKernel, Drop, LocalAttend, block_of, target_block_of
from megagraph_cli.model.bias import AttentionBias, build_bias
from megagraph_cli.model.blocks import LayerShape
from megagraph_cli.model.init import initialise
from megagraph_cli.model.transformer import ModelShape, Stage
from megagraph_cli.parallel.allgather import allgather_attention
from megagraph_cli.parallel.context import (
    ContextAttention,
    Ring,
    RingCall,
    ring_attention,
    ring_target_attention,
)
from megagraph_cli.parallel.mesh import Mesh
from megagraph_cli.parallel.pipeline import Boundary, Neighbours, Pipeline, SingleStage, Staged
from megagraph_cli.runtime.tensors import DeviceBatch

SHARED_PARAMETERS = frozenset({"token_bias"})
"""Parameters of which every stage holds a copy."""
TABLE = "embedding.table"
"""The parameter whose gradient is the rows that a step touched."""


@dataclass(frozen=True)
class Order:
    """What the runtime needs of a plan: degrees, the layer split, micro-batches, schedule, and how layers run.

    ``recompute``: none, or full (a layer keeps its input alone and runs again in the backward); ``context``: ring or
    allgather.
    """

    dims: ParallelDims
    mesh_order: Sequence[str]
    layers_per_stage: Sequence[int]
    num_microbatches: int
    schedule: str
    recompute: str = "none"
    context: str = "ring"

    @classmethod
    def of(cls, plan: Plan) -> Order:
        return cls(
            dims=plan.dims.parallel(),
            mesh_order=plan.mesh_order,
            layers_per_stage=plan.layers_per_stage,
            num_microbatches=plan.num_microbatches,
            schedule=plan.schedule,
            recompute=plan.recompute,
            context=plan.context,
        )

    def layers_of(self, stage: int) -> range:
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])


CONTEXTS: dict[str, ContextAttention] = {"ring": ring_attention, "allgather": allgather_attention}
"""How keys and values of the other context ranks get here."""


class RingAttend:
    """Attend over the ranks of a context axis: the model's kernel inside one of parallel's ways round.

    The target row alone is attended to in one way, whatever ``attention`` does for all rows.
    """

    def __init__(self, ring: Ring, attention: ContextAttention = ring_attention) -> None:
        self._ring = ring
        self._attention = attention

    def _call(self, bias: AttentionBias, drop: Drop | None) -> RingCall:
        return RingCall(self._ring, BlockKernel(), lambda owner: block_of(bias, owner, drop), BiasWeights, bias.empty)

    def __call__(
        self,
        q_HBRE: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        return self._attention(q_HBRE, k_HBRE, v_HBRE, weights, self._call(bias, drop))

    def target(
        self,
        q_HB1E: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        call = RingCall(self._ring, BlockKernel(), lambda _: target_block_of(bias, drop), BiasWeights)
        return ring_target_attention(q_HB1E, k_HBRE, v_HBRE, weights, call)


def make_attend(mesh: Mesh, context: str = "ring") -> Attend:
    """The Attend of this rank: local where every row lives here, else over the context axis."""
    if mesh.dims.cp == 1:
        return LocalAttend()
    return RingAttend(Ring(mesh.cp, mesh.place.cp, mesh.dims.cp), CONTEXTS[context])


def model_shape(workload: Workload) -> ModelShape:
    """Sizes of the model that a workload with a prepared graph trains."""
    graph, model = workload.graph, workload.model
    assert graph is not None
    use_features, use_table = embedding_inputs(model.embedding, graph.features)
    return ModelShape(
        num_layers=model.num_layers,
        layer=LayerShape(
            hidden_dim=model.hidden_dim,
            ffn_dim=model.ffn_dim,
            num_heads=model.num_heads,
            bias_powers=model.bias_powers,
            dropout=model.dropout,
            attention_dropout=model.attention_dropout,
        ),
        num_features=graph.features if use_features else 0,
        table_rows=graph.nodes + graph.clusters if use_table else 0,
        num_global=workload.batch.num_global,
        num_classes=graph.classes,
        input_dropout=model.input_dropout,
    )


def parameter_dtype(workload: Workload) -> torch.dtype:
    """bfloat16 is autocast over float32 weights."""
    return torch.float64 if workload.train.dtype == "float64" else torch.float32


def wide(out: Tensor) -> Tensor:
    """What leaves a stage is float32, also under autocast (float64 for float64)."""
    return out if out.dtype == torch.float64 else out.float()


class StageRunner(nn.Module):
    """A stage that takes a micro-batch by number: what the pipeline calls.

    ``inbox`` holds the step's micro-batches; ``step`` and ``denominator`` (global number of targets) are set before
    each step. Bias channels are built here, once per micro-batch and stage.
    """

    def __init__(self, stage: Stage, workload: Workload, layout: RowLayout, mesh: Mesh) -> None:
        super().__init__()
        self.stage = stage
        self.inbox: Sequence[DeviceBatch] = ()
        self.step = 0
        self.denominator = 1.0
        self.loss_sum: Tensor | None = None
        self._workload = workload
        self._layout = layout
        self._mesh = mesh

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        number = int(index)
        batch = self.inbox[number]
        model = self._workload.model
        bias = build_bias(
            batch.topology,
            self._layout,
            self._mesh.place.cp,
            powers=model.bias_powers,
            scale=model.bias_scale,
            dtype=parameter_dtype(self._workload),
            drop_seed=self._drop_seed(),
            first_sequence=(self._mesh.place.dp * len(self.inbox) + number) * batch.labels.shape[0],
        )
        with self.autocast(batch.labels.device):
            out: Tensor = self.stage(x if batch.nodes is None else batch.nodes, bias)
        return wide(out)

    def autocast(self, device: torch.device) -> torch.autocast:
        """bfloat16 for the products of a bfloat16 workload; nothing changes for the others."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._workload.train.dtype == "bfloat16")

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        """Summed cross-entropy over the micro-batch's targets / the global number of targets.

        Only context rank 0 owns the target row; the others contribute nothing.
        """
        labels = self.inbox[int(index)].labels
        if self._mesh.place.cp:
            labels = torch.full_like(labels, IGNORED_LABEL)
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum") / self.denominator
        self.loss_sum = loss.detach() if self.loss_sum is None else self.loss_sum + loss.detach()
        return loss

    def _drop_seed(self) -> int:
        """What stands for (rng_seed, step) in the keys of dropout: the same on every rank of every plan."""
        key = f"{self._workload.train.rng_seed}/{self.step}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class StageParts:
    """One rank's share of the model and of the batch."""

    runner: StageRunner
    pipeline: Pipeline
    builder: BatchBuilder
    mesh: Mesh
    order: Order
    workload: Workload
    device: torch.device


def build_stage(
    order: Order,
    workload: Workload,
    graph: Graph,
    mesh: Mesh,
    device: torch.device,
    *,
    threads: int,
    microbatch_size: int,
) -> StageParts:
    """This rank's stage, initialised, with its pipeline and its batch builder. No rank builds the whole model."""
    layout = workload.batch.rows(mesh.dims.cp)
    runner = StageRunner(make_stage(order, workload, mesh, device), workload, layout, mesh)
    return StageParts(
        runner=runner,
        pipeline=make_pipeline(runner, order, workload, mesh, device, microbatch_size),
        builder=make_builder(workload, graph, mesh, order.num_microbatches, microbatch_size, threads),
        mesh=mesh,
        order=order,
        workload=workload,
        device=device,
    )


def make_stage(order: Order, workload: Workload, mesh: Mesh, device: torch.device) -> Stage:
    """This rank's layers with their initial weights, on its device."""
    stage = Stage(
        model_shape(workload),
        order.layers_of(mesh.place.pp),
        make_attend(mesh, order.context),
        first=mesh.first_stage,
        last=mesh.last_stage,
        recompute=order.recompute == "full",
    ).to(parameter_dtype(workload))
    initialise(stage, workload.train.rng_seed, workload.model.bias_init_std)
    return stage.to(device)


def make_pipeline(
    runner: StageRunner, order: Order, workload: Workload, mesh: Mesh, device: torch.device, microbatch_size: int
) -> Pipeline:
    """Micro-batches one after another with one stage, else the schedule of the order."""
    if mesh.dims.pp == 1:
        return SingleStage(runner, order.num_microbatches, runner.loss)
    rows = workload.batch.rows(mesh.dims.cp).rows_per_rank
    shape = (microbatch_size, rows, workload.model.hidden_dim)
    return Staged(
        runner,
        neighbours=Neighbours(mesh.place.pp, mesh.dims.pp, mesh.pp_down, mesh.pp_up),
        schedule=order.schedule,
        num_microbatches=order.num_microbatches,
        loss=runner.loss,
        boundary=Boundary(shape, parameter_dtype(workload), device),
    )


def make_builder(
    workload: Workload, graph: Graph, mesh: Mesh, num_microbatches: int, microbatch_size: int, threads: int
) -> BatchBuilder:
    """Builds the batches of this rank's replica; ranks of the first stage also gather what they embed."""
    assert workload.graph is not None
    batch = workload.batch
    use_features, _ = embedding_inputs(workload.model.embedding, workload.graph.features)
    return BatchBuilder(
        graph=graph,
        spec=SequenceSpec(batch.num_sampled, batch.num_super, batch.num_global, workload.train.rng_seed),
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        threads=threads,
        input_layout=workload.batch.rows(mesh.dims.cp) if mesh.first_stage else None,
        cp_rank=mesh.place.cp,
        use_features=use_features,
        peers=mesh.peers,
    )
