"""Seconds of what a step does to the rows of an embedding table that it touched, by rows and pieces."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch import nn

from megagraph_cli.artifacts.profile import SUMMED_RANKS, ComputeSample
from megagraph_cli.parallel.row_adamw import RowAdamW
from megagraph_cli.parallel.table import RowSum, TableGradient, TouchedRows
from megagraph_cli.runtime.build import parameter_dtype
from megagraph_cli.runtime.measure import mean_over_ranks, timed
from megagraph_cli.runtime.probes import Context, context_mesh


class TouchedProbe:
    """A table of the workload's size with its gradient and its optimizer, alone on this rank."""

    def __init__(self, context: Context, alone: dist.ProcessGroup) -> None:
        workload = context.workload
        dim = workload.model.hidden_dim
        shape = (workload.parameters().table // dim, dim)
        self.context = context
        self.table = nn.Parameter(torch.zeros(shape, dtype=parameter_dtype(workload), device=context.device))
        self.gradient = TableGradient(self.table, context_mesh(alone))
        self.optimizer = RowAdamW(self.table, weight_decay=workload.train.weight_decay)
        self._generator = torch.Generator().manual_seed(0)
        self._ids = torch.empty(0)
        self._rows = self._everyones = torch.empty(0)

    def load(self, rows: int) -> None:
        """Put gradients in place of so many rows, different and evenly drawn ones on each of the summed ranks."""
        num_rows, dim = self.table.shape
        drawn = [torch.randperm(num_rows, generator=self._generator)[:rows].sort().values for _ in range(SUMMED_RANKS)]
        self._ids = torch.stack(drawn).to(self.context.device)
        self._rows = self.table.new_empty((rows, dim)).normal_()
        # As gathered ones they lie apart.
        self._everyones = self._rows.detach().repeat(SUMMED_RANKS, 1, 1)

    def merge(self, pieces: int) -> None:
        """The part of ``TableGradient.reduce`` that sends nothing."""
        rows = self._rows.shape[0]
        total = RowSum(self._ids.clone(), self.table, rows)
        length = -(-rows // pieces)
        for first in range(0, rows, length):
            total.add(first, self._everyones[:, first : first + length])

    def update(self, pieces: int) -> None:
        """Norm, clipping and update, as ``TrainStep`` has them."""
        touched = TouchedRows(self._ids[0], self._rows, self._rows.shape[0])
        self.gradient.touched = touched
        norm = self.gradient.square_sum().sqrt()
        if self.context.workload.train.grad_clip:
            self.gradient.scale(1.0 / norm.clamp(min=1.0))
        self.optimizer.step(touched, 1e-4, pieces)
        self.gradient.forget()


def measure_touched(probe: TouchedProbe, rows: int, pieces: int, runs: int) -> ComputeSample:
    """One sample of ``rows`` touched rows in ``pieces``; all ranks measure at the same time."""
    context = probe.context
    with context.fragmentation.watched(context.device):
        probe.load(rows)
        probe.merge(pieces)
        probe.update(pieces)
    dist.barrier()
    times = []
    for _ in range(runs):
        times.append(timed(lambda: probe.merge(pieces), context.device))
        times.append(timed(lambda: probe.update(pieces), context.device))
    times = mean_over_ranks(times, context.device, True)
    return ComputeSample(
        module="optimizer",
        num_layers=0,
        cp=1,
        rows=rows,
        sequence_rows=context.workload.batch.rows().sequence_rows,
        microbatch_size=0,
        forward_s=statistics.median(times[::2]),
        backward_s=statistics.median(times[1::2]),
        memory={"parameters": probe.table[0].nbytes * rows},
        samples_s=[times[i : i + 2] for i in range(0, len(times), 2)],
        pieces=pieces,
    )
