"""How far a profile measured, by way to run layers, and what a plan asks beyond that."""

from __future__ import annotations

from collections.abc import Sequence

from megagraph_cli.artifacts.cost_model import Exhausted, MeasuredRange, MeasuredWay
from megagraph_cli.artifacts.profile import ComputeSample, Profile
from megagraph_cli.cost.size import Size


def measured_range(profile: Profile) -> MeasuredRange:
    """The most of each quantity that was measured, and where memory ran out."""
    layers = [sample for sample in profile.compute if sample.module == "layer" and not sample.out_of_memory]
    by_way: dict[tuple[str, str, bool], list[ComputeSample]] = {}
    for sample in layers:
        by_way.setdefault((sample.recompute, sample.context, sample.cp > 1), []).append(sample)
    exhausted = [_bound(sample, profile.compute) for sample in profile.compute if sample.out_of_memory]
    return MeasuredRange(
        gpus=profile.machine.num_devices,
        layers=max(sample.num_layers for sample in layers),
        microbatch_size=max(sample.microbatch_size for sample in layers),
        message_bytes=max((sample.message_bytes for sample in profile.comm), default=0),
        touched_bytes=max((each.memory["parameters"] for each in profile.compute if each.pieces), default=0),
        ways=[_range(by_way[key]) for key in sorted(by_way)],
        exhausted=sorted(exhausted, key=Exhausted.model_dump_json),
    )


def most_measured(measured: MeasuredRange, size: Size) -> tuple[int, int]:
    """(layers in a row, sequences of a micro-batch) up to which a stage as ``size`` is no extrapolation.

    A way that was never measured has terms that are missing, so that no plan gets this far.
    """
    way = _measured_way(measured, size)
    fits = [each.fits for each in measured.exhausted if _at_least(size, each)]
    return way.layers, min([way.microbatch_size, *fits])


def least_microbatch(measured: MeasuredRange, size: Size) -> int:
    """Sequences of a micro-batch from which on a stage as ``size`` is no extrapolation: 1 where it is not known."""
    return _measured_way(measured, size).least_microbatch_size or 1


def _measured_way(measured: MeasuredRange, size: Size) -> MeasuredWay:
    return next(way for way in measured.ways if _way(way) == (size.recompute, size.context, size.cp > 1))


def _at_least(size: Size, found: Exhausted) -> bool:
    """Whether a stage needs as much as what ran out of memory: a smaller context degree has more rows on a rank."""
    return (
        size.cp <= found.cp
        and size.layers >= found.layers
        and size.microbatch >= found.microbatch_size
        and found.recompute in (None, size.recompute)
        and found.context in (None, size.context)
    )


def _way(way: MeasuredWay) -> tuple[str, str, bool]:
    return way.recompute, way.context, way.spread


def _range(samples: Sequence[ComputeSample]) -> MeasuredWay:
    first = samples[0]
    return MeasuredWay(
        recompute=first.recompute,
        context=first.context,
        spread=first.cp > 1,
        layers=max(sample.num_layers for sample in samples),
        microbatch_size=max(sample.microbatch_size for sample in samples),
        least_microbatch_size=min(sample.microbatch_size for sample in samples),
    )


def _bound(sample: ComputeSample, samples: Sequence[ComputeSample]) -> Exhausted:
    """What a sample of a rank that ran out of memory says about plans."""

    def subject(each: ComputeSample) -> tuple[object, ...]:
        return each.module, each.num_layers, each.cp, each.recompute, each.context, each.link

    alike = [each for each in samples if subject(each) == subject(sample) and not each.out_of_memory]
    is_layer = sample.module == "layer"
    return Exhausted(
        cp=sample.cp,
        recompute=sample.recompute if is_layer or sample.module == "last_layer" else None,
        context=sample.context if is_layer and sample.cp > 1 else None,
        layers=sample.num_layers if is_layer else 0,
        microbatch_size=sample.microbatch_size,
        fits=max((each.microbatch_size for each in alike), default=0),
    )
