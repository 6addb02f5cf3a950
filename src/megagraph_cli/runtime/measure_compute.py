"""Seconds and bytes of each module, forward and backward, at several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import ComputeSample, Link
from megagraph_cli.errors import EXIT_INFEASIBLE, MgraphError
from megagraph_cli.runtime.grid import PLAIN, RUNS, Sizes, Way
from megagraph_cli.runtime.measure import NANO, max_over_ranks, mean_over_ranks, timed, unless_exhausted
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.probes import Context, Probe, context_mesh

Module = Literal["input", "layer", "last_layer", "head", "optimizer"]
TRIAL_SEQUENCES = 32
"""On a CPU more need not be tried: a micro-batch of so many tells what one sequence takes. On cuda it does not: as long
as a layer takes no longer than its kernels take to start, twice as many sequences take no longer."""
_READINGS = 3
_MEMORY = ("parameters", "saved", "forward_peak", "backward_peak", "batch")


@dataclass(frozen=True)
class Room:
    """Bytes that a measured module may take, the same on all ranks.

    ``may_try``: whether a rank that exchanges nothing may run a size that seems to need more. Where the device itself
    says that it is out of memory it may; on a CPU the host would swap, or end the process.
    """

    limit_bytes: float
    may_try: bool = False

    def allows(self, samples: Sequence[ComputeSample], subject: Subject, size: int) -> bool:
        """Whether ``size`` is to be run, by what smaller ones took: every rank answers alike, none waits in vain.

        Bytes are sums of constants and of shares of layers, sequences or both, so that twice as many of these take at
        most twice the bytes. A module of which nothing is known yet is run.
        """
        smaller = [
            sample
            for sample in samples
            if sample.module == subject.kind
            and sample.num_layers <= subject.num_layers
            and sample.microbatch_size <= size
        ]
        if any(sample.out_of_memory for sample in smaller):
            return False
        if self.may_try and subject.cp == 1:
            return True
        needs = [_most_bytes(sample, subject.num_layers, size) for sample in smaller]
        return min(needs, default=0.0) <= self.limit_bytes


def _most_bytes(sample: ComputeSample, num_layers: int, size: int) -> float:
    """The most that a module of as many layers or more, at a micro-batch as large or larger, can take in all."""
    layers = max(1, num_layers) / max(1, sample.num_layers)
    memory = sample.memory
    moving = memory["batch"] + max(memory["forward_peak"], memory["saved"] + memory["backward_peak"])
    # Weights, their gradients and two moments.
    return layers * (4 * memory["parameters"] + moving * size / sample.microbatch_size)


def measure_modules(
    context: Context,
    cp: int,
    group: dist.ProcessGroup | None,
    way: Way,
    sizes: Sizes,
    room: Room,
    link: Link = "host",
) -> list[ComputeSample]:
    """What ``way`` matters to, at one context degree: every module for the plain way, else layers.

    Over the network layers alone: nothing else sends anything. Sizes beyond ``room`` are left out. Where a rank runs
    out of memory the sample says so and larger sizes of the module are left out.

    Ranks without a ``group`` only take part in the gathering of results.
    """
    kinds: list[tuple[Module, int]] = [("layer", n) for n in (*sizes.layers, *sizes.deep)]
    if way.context == "ring":
        kinds.append(("last_layer", 1))
    if way == PLAIN and link == "host":
        kinds += [("input", 0), ("head", 0)]
    samples: list[ComputeSample] = []
    for kind, num_layers in kinds:
        subject = Subject(kind, num_layers, cp, way, link)
        probe = None
        for size in sizes.microbatches_of(num_layers):
            if not room.allows(samples, subject, size):
                break
            if group is not None and probe is None:
                probe = Probe(context, context_mesh(group), kind, num_layers, way)
            samples.append(_measure(context, probe, subject, size, sizes.runs))
    return samples


class Subject(NamedTuple):
    """What is measured, but for the size of a micro-batch."""

    kind: Module
    num_layers: int
    cp: int
    way: Way
    link: Link


def _measure(context: Context, probe: Probe | None, subject: Subject, size: int, runs: int) -> ComputeSample:
    """One sample, or what is known of one where a rank ran out of memory.

    Ranks of one module fail alike, for they ask for the same. Should only some of a group that exchanges rows fail
    nevertheless, the others wait for them until the deadline of collectives, and the profile fails.
    """
    dist.barrier()
    found: _Readings | None = _Readings([0] * len(_MEMORY), [0.0] * (2 * runs))
    if probe is not None:
        found = unless_exhausted(partial(_readings, probe, size, runs))
    (exhausted,) = max_over_ranks([int(found is None)], context.device, probe is not None)
    if probe is not None and exhausted:
        probe.unload()
    if exhausted or found is None:
        parameters_bytes = 0 if probe is None else probe.parameters_bytes
        (parameters_bytes,) = max_over_ranks([parameters_bytes], context.device, probe is not None)
        return _sample(context, subject, size, {"parameters": parameters_bytes}, [])
    passes = mean_over_ranks(found.passes_s, context.device, probe is not None)
    memory = max_over_ranks(found.memory, context.device, probe is not None)
    return _sample(context, subject, size, dict(zip(_MEMORY, memory, strict=True)), passes)


class _Readings(NamedTuple):
    """Bytes by ``_MEMORY``, and seconds of each run's forward and backward in turn."""

    memory: list[int]
    passes_s: list[float]


def _readings(probe: Probe, size: int, runs: int) -> _Readings:
    # One pass goes before what is metered and timed, so that nothing is first.
    with probe.context.fragmentation.watched(probe.context.device):
        batch = probe.load(size)
        probe.backward(probe.forward())
    memory = [probe.parameters_bytes, *_memory_of(probe), batch]
    return _Readings(memory, [seconds for _ in range(runs) for seconds in _one_run(probe)])


def _sample(
    context: Context, subject: Subject, size: int, memory: dict[str, int], passes_s: list[float]
) -> ComputeSample:
    """A sample of these readings; without any, of a rank that ran out of memory."""
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
        forward_s=statistics.median(passes_s[::2] or [0.0]),
        backward_s=statistics.median(passes_s[1::2] or [0.0]),
        memory=memory,
        samples_s=[passes_s[i : i + 2] for i in range(0, len(passes_s), 2)],
        out_of_memory=not passes_s,
    )


def _one_run(probe: Probe) -> tuple[float, float]:
    """(forward, backward) seconds of one micro-batch."""
    held: list[torch.Tensor] = []
    forward_s = timed(lambda: held.append(probe.forward()), probe.context.device)
    backward_s = timed(lambda: probe.backward(held.pop()), probe.context.device)
    return forward_s, backward_s


def _memory_of(probe: Probe) -> list[int]:
    """[saved, forward peak, backward peak] of one micro-batch.

    The least of several readings: a collective's own thread may free memory late, and only ever adds to a reading.
    """
    readings = [_one_reading(probe) for _ in range(_READINGS if probe.way.context == "allgather" else 1)]
    return [min(values) for values in zip(*readings, strict=True)]


def _one_reading(probe: Probe) -> list[int]:
    with metered(probe.context.device, from_zero=True) as ahead:
        out = probe.forward()
    with metered(probe.context.device, from_zero=True) as back:
        probe.backward(out)
    start = ahead.start_bytes
    return [ahead.end_bytes - start, ahead.peak_bytes - start, back.peak_bytes - back.start_bytes]


def measure_optimizer(context: Context, alone: dist.ProcessGroup, num_layers: int, runs: int = RUNS) -> ComputeSample:
    """What follows a step's reductions, for the weights of ``num_layers`` layers."""
    probe = Probe(context, context_mesh(alone), "optimizer", num_layers)
    with context.fragmentation.watched(context.device):
        probe.optimize()
    with metered(context.device, from_zero=True) as reading:
        probe.optimize()
    samples = mean_over_ranks([timed(probe.optimize, context.device) for _ in range(runs)], context.device, True)
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


class Trial(NamedTuple):
    """What is known before the grid is chosen, the same on all ranks.

    ``largest``: the micro-batch whose layer takes the seconds asked for; ``sequence_s``: seconds of one sequence in it,
    forward and backward.
    """

    largest: int
    sequence_s: float


def try_microbatches(context: Context, alone: dist.ProcessGroup, layer_s: float, limit_bytes: float) -> Trial:
    """Find the micro-batch whose layer takes about ``layer_s`` and at most ``limit_bytes`` on every rank.

    From one sequence on they double while twice as many take no more than either by what this many take: on a CPU to
    what tells a slope, on cuda to the whole batch.
    Raises MgraphError (exit 3) where one sequence is too much.
    """
    most = context.workload.batch.batch_size
    if context.device.type == "cpu":
        most = min(most, TRIAL_SEQUENCES)
    probe = Probe(context, context_mesh(alone), "layer", 1)
    size, found = 1, None
    while taken := _tried(probe, size):
        fits = min(layer_s / taken.seconds, limit_bytes / taken.bytes)
        found = Trial(max(1, int(size * fits)), taken.seconds / size)
        following = min(2 * size, most)
        if size == most or following > found.largest:
            break
        size = following
    probe.unload()
    if found is None:
        raise MgraphError(
            "one sequence in one layer takes more than the free memory; free some, or make batch.num_sampled or "
            "model.hidden_dim smaller",
            EXIT_INFEASIBLE,
        )
    return found if taken else found._replace(largest=min(found.largest, size - 1))


class _Taken(NamedTuple):
    seconds: float
    bytes: int


def _tried(probe: Probe, size: int) -> _Taken | None:
    """The most seconds and bytes of any rank; None where one ran out of memory."""

    def run() -> _Taken:
        probe.load(size)
        probe.backward(probe.forward())
        with metered(probe.context.device, from_zero=True) as reading:
            probe.backward(probe.forward())
        return _Taken(min(sum(_one_run(probe)) for _ in range(RUNS)), max(1, reading.peak_bytes - reading.start_bytes))

    taken, device = unless_exhausted(run), probe.context.device
    values = [1, 0, 0] if taken is None else [0, round(taken.seconds / NANO), taken.bytes]
    exhausted, nanoseconds, most_bytes = max_over_ranks(values, device, True)
    return None if exhausted else _Taken(max(1, nanoseconds) * NANO, most_bytes)
