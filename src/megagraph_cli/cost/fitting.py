"""From a profile's measurements to a cost model's coefficients, and how well these foretell what was held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megagraph_cli.artifacts.cost_model import CostModel, Quality, QualityTable
from megagraph_cli.artifacts.profile import ComputeSample, Profile
from megagraph_cli.cost.arrays import Regressors
from megagraph_cli.cost.cache import CacheBreak, LayerSamples, find_break
from megagraph_cli.cost.floors import FLOORS, Sample, fit_moments, with_floor
from megagraph_cli.cost.judge import quality, short
from megagraph_cli.cost.measured import measured_range
from megagraph_cli.cost.memory import OPTIMIZER_MOMENTS
from megagraph_cli.cost.observations import (
    Observation,
    compute_observations,
    host_observations,
    link_observations,
    size_of,
    touched_observations,
    values_of,
)
from megagraph_cli.cost.regression import evaluate, fit_coefficients, never_measured, profile_call
from megagraph_cli.cost.size import POOLS, Size, frame_of
from megagraph_cli.cost.terms import MODULES, over

LINK_TIMES = frozenset(
    f"{over(link, op)}_s" for op in ("p2p", "all_reduce", "all_gather") for link in ("host", "network")
)
TOUCHED_TIMES = frozenset({"touched_merge_s", "touched_update_s"})
TIMES = frozenset({"forward_s", "backward_s", "optimizer_s", "construct_s", "gather_s"}) | TOUCHED_TIMES | LINK_TIMES
PASSES = ("forward_s", "backward_s")
MARGIN_FOLDS = 4
LEAST_SHARE_DRAWN = 0.3
"""Rows drawn, as a share of those that there are, from which on distinct ones are fewer by more than a seventh."""
HOLD_OUT_EVERY = 4
HOLD_OUT_FROM = 6
"""A group of fewer samples is too small to spare one."""


def fit(profile: Profile, sets: Sequence[str] = ()) -> CostModel:
    """Coefficients of every term, held-out quality and margin; a function of the profile.

    The coefficients come from all samples; quality from a fit that left every fourth sample of a group out, the margin
    from that one and four more, which together left out every sample but those of the smallest and largest sizes.
    ``sets`` are the ``--set`` texts with which ``mgraph profile`` measures this workload.
    Raises MgraphError (exit 4) where the profile lacks a term that every plan needs.
    """
    usable = [sample for sample in profile.compute if not sample.out_of_memory]
    _check_complete(profile, usable, sets)
    threads = max(sample.threads for sample in profile.host)
    frame = frame_of(profile.workload, profile.machine.device, threads)
    observations = compute_observations(usable, frame) + touched_observations(usable)
    observations += link_observations(profile) + host_observations(profile)
    held_out = _held_out(observations)
    # Found without what is held out, as every coefficient that is judged by it.
    found = _find_break([item for item, out in zip(observations, held_out, strict=True) if not out])
    observations = _broken(observations, found)
    kept = [item for item, out in zip(observations, held_out, strict=True) if not out]
    trial = _fit_terms(kept)
    terms = _fit_terms(observations)
    times = [item for item, out in zip(observations, held_out, strict=True) if out and item.quantity in TIMES]
    time_quality = quality(
        [item.value for item in times],
        [_predicted(trial, item) for item in times],
        num_fit=sum(item.quantity in TIMES for item in kept),
    )
    modules = [sample for sample in usable if sample.module != "optimizer"]
    judged = _judged(modules, frame)
    memory_quality = _judge_memory(judged, trial, frame, num_fit=len(modules) - len(judged))
    terms["margin"] = {"relative": _margin(modules, terms, judged, trial, frame)}
    if found is not None:
        largest = max((size_of(sample) for sample in usable), key=lambda size: (size.tokens, size.microbatch))
        terms["cache"] = found.terms(largest)
    terms["threads"] = {"per_worker": float(threads)}
    return CostModel(
        workload=profile.workload,
        machine=profile.machine,
        terms={name: terms[name] for name in sorted(terms)},
        quality=QualityTable(memory=memory_quality, time=time_quality),
        measured=measured_range(profile),
    )


def _check_complete(profile: Profile, usable: Sequence[ComputeSample], sets: Sequence[str]) -> None:
    machine = profile.machine
    remedy = f"{profile_call(profile.workload, machine.device, sets, machine.hosts)} --gpus {machine.num_devices}"
    found = {sample.module for sample in usable if not sample.pieces}
    for module in (*MODULES, "optimizer"):
        if module not in found:
            raise never_measured(f"the {module.replace('_', ' ')}", remedy)
    if profile.workload.parameters().table and not any(sample.pieces for sample in usable):
        raise never_measured("the touched rows of the embedding table", remedy)
    for op in ("construct", "gather"):
        if op not in {sample.op for sample in profile.host}:
            raise never_measured(f"the host's {op} time", remedy)


def _held_out(observations: Sequence[Observation]) -> list[bool]:
    """Every fourth sample of a group of at least six, by place in it; the smallest and the largest stay in."""
    places: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for item in observations:
        places.setdefault((item.quantity, item.group), []).append(item.place)
    chosen: dict[tuple[str, str], set[tuple[float, ...]]] = {}
    for key, found in places.items():
        ordered = sorted(set(found))
        inner = ordered[2:-1] if len(ordered) >= HOLD_OUT_FROM else []
        chosen[key] = set(inner[::HOLD_OUT_EVERY])
    return [item.place in chosen[item.quantity, item.group] for item in observations]


def _find_break(observations: Sequence[Observation]) -> CacheBreak | None:
    """The cache break that forward and backward samples of layers agree on."""
    samples = []
    for quantity in PASSES:
        mine = sorted((item for item in observations if item.quantity == quantity), key=_order)
        rows, values = [item.regressors for item in mine], [item.value for item in mine]
        samples.append(LayerSamples.of(rows, values, [item.size for item in mine]))
    sizes = [size for size in samples[0].sizes if size.layers]
    return find_break(sizes, lambda found: sum(each.squares(found) for each in samples))


def _broken(observations: Sequence[Observation], found: CacheBreak | None) -> list[Observation]:
    """The observations with the layers' regressors as they are under a cache break."""
    if found is None:
        return list(observations)
    return [
        replace(item, regressors=found.applied(item.regressors, item.size)) if item.quantity in PASSES else item
        for item in observations
    ]


def _fit_terms(observations: Sequence[Observation]) -> dict[str, dict[str, float]]:
    """One joint non-negative least squares per quantity."""
    terms = {}
    for quantity in sorted({item.quantity for item in observations}):
        # The order of the file must not move a last digit.
        mine = sorted((item for item in observations if item.quantity == quantity), key=_order)
        open_ = _undetermined(mine)
        mine = [replace(item, regressors=_without(item.regressors, open_)) for item in mine]
        if quantity in FLOORS:
            samples = [Sample(item.regressors, item.size, item.value) for item in mine]
            terms[quantity], terms[FLOORS[quantity]] = fit_moments(samples)
        else:
            terms[quantity] = fit_coefficients([item.regressors for item in mine], [item.value for item in mine])
        terms[quantity] = dict(sorted((terms[quantity] | dict.fromkeys(open_, 0.0)).items()))
    return terms


def _undetermined(observations: Sequence[Observation]) -> frozenset[str]:
    """Coefficients that these samples cannot tell from another one, which grows faster: they are left at zero.

    Gathered rows grow with cp, so two degrees must tell them from a rank's own. Distinct rows are all rows where few
    are drawn.
    """
    found = set()
    for name in {name for item in observations for name in item.regressors}:
        sizes = [item.size for item in observations if name in item.regressors]
        if name.endswith(".allgather_own_rows") and len({size.cp for size in sizes}) < 2:
            found.add(name)
        share = POOLS.get(name.split(".")[-1])
        if share and share * max(size.drawn / size.pool for size in sizes) < LEAST_SHARE_DRAWN:
            found.add(name)
    return frozenset(found)


def _without(regressors: Regressors, names: frozenset[str]) -> Regressors:
    return {name: value for name, value in regressors.items() if name not in names}


def _order(item: Observation) -> tuple[str, tuple[float, ...], float]:
    return item.group, item.place, item.value


def _predicted(terms: Mapping[str, Mapping[str, float]], item: Observation) -> float:
    # A trial fit that held the only sample of a coefficient out predicts without it: that is its error.
    known = terms.get(item.quantity, {})
    regressors = {name: value for name, value in item.regressors.items() if name in known}
    value = evaluate({item.quantity: known}, item.quantity, regressors, remedy="mgraph profile")
    return float(with_floor(terms, item.quantity, next(iter(item.regressors)).split(".")[0], item.size, value))


def _judged(modules: Sequence[ComputeSample], frame: Size) -> list[ComputeSample]:
    """Samples that the fit for the quality left out."""
    observations = [item for item in compute_observations(modules, frame) if item.quantity == "batch_bytes"]
    return [sample for sample, out in zip(modules, _held_out(observations), strict=True) if out]


def _judge_memory(
    judged: Sequence[ComputeSample], trial: Mapping[str, Mapping[str, float]], frame: Size, num_fit: int
) -> Quality:
    """Quality on held-out compute samples."""
    measured = [_whole_peak(sample, values_of(sample)) for sample in judged]
    predicted = [_whole_peak(sample, _predicted_values(sample, trial, frame)) for sample in judged]
    return quality(measured, predicted, num_fit=num_fit)


def _margin(
    modules: Sequence[ComputeSample],
    terms: Mapping[str, Mapping[str, float]],
    judged: Sequence[ComputeSample],
    trial: Mapping[str, Mapping[str, float]],
    frame: Size,
) -> float:
    """The most by which a sample is above what the others foretell of it, as a share of a stage that has it.

    Every sample between the smallest and the largest micro-batch of what it measures is left out once, a quarter of
    them at a time, neighbours in size in different quarters. Those at the ends, without which a fit would foretell what
    lies beyond all that it knows, are held against ``terms``, which were fitted to them too, and the ``judged`` ones,
    which the quality comes from, against its ``trial``. No stage is smaller than one layer of the same size, so that an
    input's or a head's bytes weigh as they do in a plan of one micro-batch.
    """
    modules = sorted(modules, key=_sorted_by)
    sizes: dict[tuple[str | int, ...], set[int]] = {}
    stages: dict[tuple[int, int, int], float] = {}
    for sample in modules:
        sizes.setdefault(_measured_of(sample), set()).add(sample.microbatch_size)
        if sample.module in ("layer", "last_layer"):
            peak = _whole_peak(sample, values_of(sample))
            stages[_place(sample)] = min(peak, stages.get(_place(sample), peak))

    def above(sample: ComputeSample, foretold: Mapping[str, Mapping[str, float]]) -> float:
        guess = _whole_peak(sample, _predicted_values(sample, foretold, frame))
        least = max(guess, stages.get(_place(sample), 0.0))
        return (_whole_peak(sample, values_of(sample)) - guess) / least if least > 0 else 0.0

    def within(sample: ComputeSample) -> bool:
        known = sizes[_measured_of(sample)]
        return min(known) < sample.microbatch_size < max(known)

    spared = [sample for sample in modules if within(sample)]
    ends = [sample for sample in modules if not within(sample)]
    most = max([0.0, *(above(sample, terms) for sample in ends), *(above(sample, trial) for sample in judged)])
    for fold in range(MARGIN_FOLDS):
        kept = [sample for place, sample in enumerate(spared) if place % MARGIN_FOLDS != fold]
        observations = compute_observations([*kept, *ends], frame)
        others = _fit_terms([item for item in observations if item.quantity not in TIMES])
        most = max([most, *(above(sample, others) for sample in spared[fold::MARGIN_FOLDS])])
    return short(most)


def _place(sample: ComputeSample) -> tuple[int, int, int]:
    return sample.cp, sample.rows, sample.microbatch_size


def _measured_of(sample: ComputeSample) -> tuple[str | int, ...]:
    """What was measured, whatever its size."""
    return sample.module, sample.recompute, sample.context, sample.link, sample.cp, sample.num_layers


def _sorted_by(sample: ComputeSample) -> tuple[Any, ...]:
    return *_measured_of(sample), sample.microbatch_size, sample.rows, tuple(sorted(sample.memory.items()))


def _predicted_values(sample: ComputeSample, terms: Mapping[str, Mapping[str, float]], frame: Size) -> dict[str, float]:
    observations = compute_observations([sample], frame)
    return {item.quantity: _predicted(terms, item) + item.known for item in observations if item.quantity not in TIMES}


def _whole_peak(sample: ComputeSample, values: dict[str, float]) -> float:
    """Bytes of a module trained alone: static, batch, and the larger of its forward and backward peak."""
    static = (2 + OPTIMIZER_MOMENTS) * sample.memory.get("parameters", 0) + values["batch_bytes"]
    forward = values["saved_bytes"] + values["forward_transient_bytes"]
    return static + max(forward, values["saved_bytes"] + values["backward_transient_bytes"])
