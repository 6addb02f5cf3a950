"""Seconds and bytes of each module, forward and backward, at several sizes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import ComputeSample, Link, Recompute
from megagraph_cli.artifacts.profile import Context as ContextName
from megagraph_cli.runtime.measure import RUNS, max_over_ranks, mean_over_ranks, timed
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.probes import PLAIN, Context, Probe, Way, context_mesh

Module = Literal["input", "layer", "last_layer", "head", "optimizer"]
_READINGS = 3
_MEMORY = ("parameters", "saved", "forward_peak", "backward_peak", "batch")


@dataclass(frozen=True)
class Sizes:
    """Layers in a row and sequences of a micro-batch that are measured in every combination."""

    layers: tuple[int, ...]
    microbatches: tuple[int, ...]


def ways(cp: int) -> list[Way]:
    """Every way in which a plan of that context degree may run its layers, the plain one first."""
    contexts: tuple[ContextName, ...] = ("ring",) if cp == 1 else ("ring", "allgather")
    recomputes: tuple[Recompute, ...] = ("none", "full")
    return [Way(recompute, context) for context in contexts for recompute in recomputes]


def measure_modules(
    context: Context, cp: int, group: dist.ProcessGroup | None, way: Way, sizes: Sizes, link: Link = "host"
) -> list[ComputeSample]:
    """What ``way`` matters to, at one context degree: every module for the plain way, else layers.

    Over the network layers alone: nothing else sends anything.

    Ranks without a ``group`` only take part in the gathering of results.
    """
    kinds: list[tuple[Module, int]] = [("layer", n) for n in sizes.layers]
    if way.context == "ring":
        kinds.append(("last_layer", 1))
    if way == PLAIN and link == "host":
        kinds += [("input", 0), ("head", 0)]
    samples = []
    for kind, num_layers in kinds:
        probe = None if group is None else Probe(context, context_mesh(group), kind, num_layers, way)
        subject = Subject(kind, num_layers, cp, way, link)
        samples += [_measure(context, probe, subject, size) for size in sizes.microbatches]
    return samples


class Subject(NamedTuple):
    """What is measured, but for the size of a micro-batch."""

    kind: Module
    num_layers: int
    cp: int
    way: Way
    link: Link


def _measure(context: Context, probe: Probe | None, subject: Subject, size: int) -> ComputeSample:
    dist.barrier()
    passes = [0.0] * (2 * RUNS)
    memory = [0] * len(_MEMORY)
    if probe is not None:
        batch = probe.load(size)
        memory = [probe.parameters_bytes, *_memory_of(probe), batch]
        passes = [seconds for _ in range(RUNS) for seconds in _one_run(probe)]
    passes = mean_over_ranks(passes, context.device, probe is not None)
    memory = max_over_ranks(memory, context.device, probe is not None)
    rows = context.workload.batch.rows(subject.cp)
    return ComputeSample(
        module=subject.kind,
        num_layers=subject.num_layers,
        cp=subject.cp,
        rows=rows.rows_per_rank,
        sequence_rows=rows.sequence_rows,
        microbatch_size=size,
        recompute=subject.way.recompute,
        context=subject.way.context,
        link=subject.link,
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
    """[saved, forward peak, backward peak] of one micro-batch; one run goes before, so that nothing is first.

    The least of several readings: a collective's own thread may free memory late, and only ever adds to a reading.
    """
    probe.backward(probe.forward())
    readings = [_one_reading(probe) for _ in range(_READINGS if probe.way.context == "allgather" else 1)]
    return [min(values) for values in zip(*readings, strict=True)]


def _one_reading(probe: Probe) -> list[int]:
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
