"""Seconds of the host's work for a batch: drawing sequences and gathering the rows that the first stage embeds."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Literal

import torch

from megagraph_cli.artifacts.profile import HostSample
from megagraph_cli.artifacts.workload import embedding_inputs
from megagraph_cli.graph.batch import BatchBuilder, SequenceSpec, gather_inputs
from megagraph_cli.runtime.grid import RUNS
from megagraph_cli.runtime.measure import mean_over_ranks, timed
from megagraph_cli.runtime.probes import Context

Op = Literal["construct", "gather"]


def measure_host(context: Context, num_targets: int, runs: int = RUNS) -> list[HostSample]:
    """Both parts of building a batch of ``num_targets``, by the threads that a worker has, on all workers at once."""
    workload = context.workload
    assert workload.graph is not None
    batch, cpu = workload.batch, torch.device("cpu")
    spec = SequenceSpec(batch.num_sampled, batch.num_super, batch.num_global, workload.train.rng_seed)
    builder = BatchBuilder(context.graph, spec, 1, num_targets, context.threads)
    targets = context.targets_of(num_targets)
    use_features, _ = embedding_inputs(workload.model.embedding, workload.graph.features)
    builder.warm_up()
    (built,) = builder.build(targets, epoch=1, view=0)

    def gather() -> object:
        return gather_inputs(context.graph, built.sequences, batch.rows(), 0, use_features)

    gather()
    samples: dict[Op, list[float]] = {
        "construct": [timed(partial(builder.build, targets, epoch=epoch, view=0), cpu) for epoch in range(2, 2 + runs)],
        "gather": [timed(gather, cpu) for _ in range(runs)],
    }
    return [_sample(context, op, num_targets, taken) for op, taken in samples.items()]


def _sample(context: Context, op: Op, num_targets: int, taken: list[float]) -> HostSample:
    samples = mean_over_ranks(taken, context.device, True)
    return HostSample(
        op=op,
        targets=num_targets,
        sequence_rows=context.workload.batch.rows().sequence_rows,
        threads=context.threads,
        time_s=statistics.median(samples),
        samples_s=samples,
    )
