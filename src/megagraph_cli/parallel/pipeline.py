"""Heterogeneous pipeline parallelism (HPP): micro-batches through stages of unequal layer counts.

A stage module is called as ``module(x, index)``: ``index`` int64 [1] on the CPU is the number of the micro-batch,
whose own tensors (ids, bias, labels) each rank already has; only x crosses a boundary. torch.distributed.pipelining
runs the schedule; with one stage the micro-batches simply accumulate one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from megagraph_cli.layout.schedules import SCHEDULES


class Pipeline(Protocol):
    """Runs all micro-batches of one step on this rank's stage."""

    def step(self) -> None:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters."""
        ...

    def infer(self) -> list[Tensor]:
        """Forward only, without gradients; on the last stage the outputs of the micro-batches in order, else []."""
        ...


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, index [1]) -> scalar loss of that micro-batch."""


@dataclass(frozen=True)
class SingleStage:
    """pp = 1: micro-batches accumulate one after another, so one is alive at a time."""

    module: nn.Module
    num_microbatches: int
    loss: LossFunction

    def step(self) -> None:
        for index in torch.split(torch.arange(self.num_microbatches), 1):
            self.loss(self.module(index, index), index).backward()  # type: ignore[no-untyped-call]

    def infer(self) -> list[Tensor]:
        with torch.no_grad():
            return [self.module(index, index) for index in torch.split(torch.arange(self.num_microbatches), 1)]


class Staged:
    """pp > 1 with a schedule of torch.distributed.pipelining.

    ``boundary`` is an example of x as it crosses into or out of a stage: one static shape for all boundaries;
    ``output`` an example of the last stage's output.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        num_stages: int,
        group: dist.ProcessGroup,
        schedule: str,
        num_microbatches: int,
        loss: LossFunction,
        boundary: Tensor,
        output: Tensor,
    ) -> None:
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.index = torch.arange(num_microbatches)
        self._stage = pipelining.PipelineStage(
            module,
            stage,
            num_stages,
            boundary.device,
            input_args=self.index[:1] if self.first else boundary.detach().requires_grad_(),
            output_args=(output if self.last else boundary).detach().requires_grad_(),
            group=group,
        )

        def loss_in_training(output: Tensor, index: Tensor) -> Tensor:
            # The schedule computes a loss whenever it has a target, in inference too, where nobody asks for one.
            return loss(output, index) if torch.is_grad_enabled() else output.new_zeros(())

        make: Any = getattr(pipelining, SCHEDULES[schedule].torch_class)
        # One scale for the whole batch is in the loss itself; no stage divides by its micro-batches.
        self._schedule = make(self._stage, num_microbatches, loss_fn=loss_in_training, scale_grads=False)

    def step(self) -> None:
        self._schedule.step(*self._args(), index=self.index, target=self.index if self.last else None)
        # The schedule keeps the last stage's outputs and input gradients until its next step: bytes nobody reads.
        self._stage.clear_runtime_states()

    def infer(self) -> list[Tensor]:
        with torch.no_grad():
            merged = self._schedule.eval(*self._args(), index=self.index, target=self.index if self.last else None)
        self._stage.clear_runtime_states()
        return list(merged.chunk(self.index.numel())) if self.last else []

    def _args(self) -> tuple[Tensor, ...]:
        return (self.index,) if self.first else ()
