"""One optimizer step: micro-batches through the pipeline, gradients summed, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.parallel.adamw import AdamW
from megagraph_cli.parallel.data import GradientBuffer
from megagraph_cli.parallel.pipeline import SpanOf, no_span
from megagraph_cli.parallel.row_adamw import RowAdamW
from megagraph_cli.parallel.table import TableGradient
from megagraph_cli.runtime.build import SHARED_PARAMETERS, TABLE, StageParts
from megagraph_cli.runtime.tensors import DeviceBatch


class TrainStep:
    """The training step of one rank; all ranks call it together.

    After ``run``, ``summary`` is a float64 tensor [loss, gradient norm, stop votes] that is equal on all ranks; read
    it a step later so that logging never waits for the device.
    """

    def __init__(self, parts: StageParts) -> None:
        train = parts.workload.train
        self.parts = parts
        self.parameters = dict(parts.runner.stage.named_parameters())
        self.dense = {name: p for name, p in self.parameters.items() if name != TABLE}
        self.gradients = GradientBuffer(self.dense, SHARED_PARAMETERS & self.dense.keys(), parts.mesh)
        self.optimizer = AdamW(self.dense, weight_decay=train.weight_decay)
        self.table: TableGradient | None = None
        self.row_optimizer: RowAdamW | None = None
        if TABLE in self.parameters:
            table = self.parameters[TABLE]
            self.table = TableGradient(table, parts.mesh)
            self.row_optimizer = RowAdamW(table, weight_decay=train.weight_decay)
        self.grad_clip = train.grad_clip

    def run(
        self,
        batch: Sequence[DeviceBatch],
        *,
        step: int,
        num_targets: int,
        lr: float,
        stop_vote: bool = False,
        span: SpanOf = no_span,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Train on this replica's micro-batches. ``num_targets`` counts the targets of the whole global batch.

        ``on_wait`` is called when the micro-batches are through, on cuda launched, and the other ranks are waited for.
        """
        runner = self.parts.runner
        runner.train()
        runner.inbox = batch
        runner.step, runner.denominator, runner.loss_sum = step, float(num_targets), None
        self.gradients.zero()
        if self.table is not None:
            self.table.begin([part.nodes.rows for part in batch if part.nodes is not None])
        self.parts.pipeline.step(self.gradients.expect_last, span)
        runner.inbox = ()
        on_wait()
        with span("link", "reduction"):
            self.gradients.reduce()
            if self.table is not None:
                self.table.reduce()
        with span("link", "norm"):
            summary = self._summarise(stop_vote)
        with span("device", "optimizer"):
            self.apply(summary[1], lr)
        return summary

    def holders(self, batch: Sequence[DeviceBatch]) -> dict[str, list[Tensor]]:
        """Tensors that live through a step, by category of the memory meter."""
        states = self.optimizer.tensors()
        if self.row_optimizer is not None:
            states += self.row_optimizer.state().values()
        return {
            "parameters": [parameter.detach() for parameter in self.parameters.values()],
            "gradients": [self.gradients.flat],
            "optimizer": states,
            "batch": [tensor for part in batch for tensor in part.tensors()],
        }

    def _summarise(self, stop_vote: bool) -> Tensor:
        """[loss, gradient norm, stop votes] of the whole model: one small all-reduce."""
        loss = self.parts.runner.loss_sum
        summary = torch.zeros(3, dtype=torch.float64, device=self.parts.device)
        if loss is not None:
            summary[0] = loss
        summary[1] = self.square_sum()
        summary[2] = float(stop_vote)
        dist.all_reduce(summary)
        summary[1].sqrt_()
        return summary

    def square_sum(self) -> Tensor:
        """This rank's part of the squared norm of the whole model's gradient, each parameter counted once."""
        total = self.gradients.square_sum()
        return total if self.table is None else total + self.table.square_sum()

    def apply(self, norm: Tensor, lr: float) -> None:
        """Clip to ``grad_clip`` as one norm over the whole model and update the parameters."""
        if self.grad_clip:
            # As a tensor, so that no host waits for the norm.
            factor = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            self.gradients.scale(factor)
            if self.table is not None:
                self.table.scale(factor)
        self.optimizer.step(lr)
        if self.table is not None:
            assert self.row_optimizer is not None
            assert self.table.touched is not None
            self.row_optimizer.step(self.table.touched, lr)
            self.table.forget()


def learning_rate(
    step: int, *, steps_per_epoch: int, epochs: int, lr: float, end_lr: float, warmup_epochs: float
) -> float:
    """Linear warm-up over ``warmup_epochs``, then linear decay that meets ``end_lr`` when the last step is done.

    ``step`` counts from 0.
    """
    total = steps_per_epoch * epochs
    warm_up = min(round(warmup_epochs * steps_per_epoch), total)
    if step < warm_up:
        return lr * (step + 1) / warm_up
    rest = max(1, total - warm_up)
    return end_lr + (lr - end_lr) * max(0.0, 1 - (step - warm_up) / rest)
