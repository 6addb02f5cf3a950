"""Seconds and bytes of each module, forward and backward, at several sizes."""

from __future__ import annotations

import statistics
from typing import Literal

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import ComputeSample
from megagraph_cli.runtime.measure import RUNS, max_over_ranks, mean_over_ranks, timed
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.probes import Context, Probe, context_mesh

Module = Literal["input", "layer", "last_layer", "head", "optimizer"]
_MEMORY = ("parameters", "saved", "forward_peak", "backward_peak", "batch")


def measure_modules(
    context: Context,
    cp: int,
    group: dist.ProcessGroup | None,
    layers: tuple[int, ...],
    microbatches: tuple[int, ...],
) -> list[ComputeSample]:
    """All modules at one context degree; ranks without a ``group`` only take part in the gathering of results."""
    kinds: list[tuple[Module, int]] = [("layer", n) for n in layers]
    kinds += [("last_layer", 1), ("input", 0), ("head", 0)]
    samples = []
    for kind, num_layers in kinds:
        probe = None if group is None else Probe(context, context_mesh(group), kind, num_layers)
        samples += [_measure(context, probe, kind, num_layers, cp, size) for size in microbatches]
    return samples


def _measure(context: Context, probe: Probe | None, kind: Module, num_layers: int, cp: int, size: int) -> ComputeSample:
    dist.barrier()
    passes = [0.0] * (2 * RUNS)
    memory = [0] * len(_MEMORY)
    if probe is not None:
        batch = probe.load(size)
        memory = [probe.parameters_bytes, *_memory_of(probe), batch]
        passes = [seconds for _ in range(RUNS) for seconds in _one_run(probe)]
    passes = mean_over_ranks(passes, context.device, probe is not None)
    memory = max_over_ranks(memory, context.device, probe is not None)
    rows = context.workload.batch.rows(cp)
    return ComputeSample(
        module=kind,
        num_layers=num_layers,
        cp=cp,
        rows=rows.rows_per_rank,
        sequence_rows=rows.sequence_rows,
        microbatch_size=size,
        forward_s=statistics.median(passes[::2]),
        backward_s=statistics.median(passes[1::2]),
        memory=dict(zip(_MEMORY, memory, strict=True)),
        samples_s=[passes[i : i + 2] for i in range(0, len(passes), 2)],
    )


def _one_run(probe: Probe) -> tuple[float, float]:
    """(forward, backward) seconds of one micro-batch."""
    held: list[torch.Tensor] = []
    forward_s = timed(lambda: held.append(probe.forward()), probe.context.device)
    backward_s = timed(lambda: probe.backward(held.pop()), probe.context.device)
    return forward_s, backward_s


def _memory_of(probe: Probe) -> list[int]:
    """[saved, forward peak, backward peak] of one micro-batch; one run goes before, so that nothing is first."""
    probe.backward(probe.forward())
    with metered(probe.context.device, from_zero=True) as ahead:
        out = probe.forward()
    with metered(probe.context.device, from_zero=True) as back:
        probe.backward(out)
    start = ahead.start_bytes
    return [ahead.end_bytes - start, ahead.peak_bytes - start, back.peak_bytes - back.start_bytes]


def measure_optimizer(context: Context, alone: dist.ProcessGroup, num_layers: int) -> ComputeSample:
    """What follows a step's reductions, for the weights of ``num_layers`` layers."""
    probe = Probe(context, context_mesh(alone), "optimizer", num_layers)
    probe.optimize()
    with metered(context.device, from_zero=True) as reading:
        probe.optimize()
    samples = mean_over_ranks([timed(probe.optimize, context.device) for _ in range(RUNS)], context.device, True)
    return ComputeSample(
        module="optimizer",
        num_layers=num_layers,
        cp=1,
        rows=1,
        sequence_rows=context.workload.batch.rows().sequence_rows,
        microbatch_size=0,
        forward_s=0.0,
        backward_s=statistics.median(samples),
        memory={"parameters": probe.parameters_bytes, "backward_peak": reading.peak_bytes - reading.start_bytes},
        samples_s=[[0.0, sample] for sample in samples],
    )


def largest_microbatch(context: Context, alone: dist.ProcessGroup, seconds: float, memory_bytes: float) -> int:
    """The micro-batch whose layer takes about ``seconds`` and at most ``memory_bytes``: the least over all ranks."""
    trial = min(context.workload.batch.batch_size, 32)
    probe = Probe(context, context_mesh(alone), "layer", 1)
    probe.load(trial)
    probe.backward(probe.forward())
    with metered(context.device, from_zero=True) as reading:
        probe.backward(probe.forward())
    taken = min(sum(_one_run(probe)) for _ in range(RUNS))
    # A probe of several layers holds several times the bytes of this one.
    fits = [trial * seconds / max(taken, 1e-6), trial * memory_bytes / max(1, reading.peak_bytes) / 8]
    largest = torch.tensor([min(fits)], dtype=torch.float64, device=context.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MIN)
    return max(1, int(largest.item()))
