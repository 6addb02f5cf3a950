"""What a profile's samples are measurements of: every quantity with the regressors that should explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megagraph_cli.artifacts.profile import SUMMED_RANKS, CommSample, ComputeSample, Profile
from megagraph_cli.cost.arrays import Regressors
from megagraph_cli.cost.size import Size
from megagraph_cli.cost.terms import (
    all_gather_regressors,
    all_reduce_regressors,
    host_regressors,
    known_bytes,
    merge_regressors,
    over,
    p2p_regressors,
    row_update_regressors,
    sample_regressors,
)

NO_SIZE = Size()


@dataclass(frozen=True)
class Observation:
    """One measured value of a quantity with the regressors that should explain it.

    ``known`` bytes were measured too, and are no part of ``value``: nothing need explain them.
    ``group`` and ``place`` order the samples, so that what is held out does not depend on their order in the file.
    """

    quantity: str
    group: str
    place: tuple[float, ...]
    regressors: Regressors
    value: float
    size: Size = NO_SIZE
    known: int = 0


def size_of(sample: ComputeSample, frame: Size = NO_SIZE) -> Size:
    """The size at which a compute sample's regressors are taken; ``frame`` as ``size.frame_of``."""
    return replace(
        frame,
        layers=sample.num_layers if sample.module == "layer" else 0,
        microbatch=sample.microbatch_size,
        rows=sample.rows,
        cp=sample.cp,
        parameters_bytes=sample.memory.get("parameters", 0),
        recompute=sample.recompute,
        context=sample.context,
        link=sample.link,
    )


def values_of(sample: ComputeSample) -> dict[str, float]:
    """The quantities that a compute sample is a measurement of, but for those of touched rows."""
    memory = sample.memory
    if sample.pieces:
        return {}
    if sample.module == "optimizer":
        return {"optimizer_s": sample.backward_s, "optimizer_transient_bytes": memory.get("backward_peak", 0)}
    saved = memory.get("saved", 0)
    return {
        "forward_s": sample.forward_s,
        "backward_s": sample.backward_s,
        "saved_bytes": saved,
        "forward_transient_bytes": max(0, memory.get("forward_peak", 0) - saved),
        "backward_transient_bytes": memory.get("backward_peak", 0),
        "batch_bytes": memory.get("batch", 0),
    }


def compute_observations(samples: Sequence[ComputeSample], frame: Size) -> list[Observation]:
    """Every quantity of every compute sample; ``frame`` as ``size.frame_of``."""
    found = []
    for sample in samples:
        size = size_of(sample, frame)
        place = (sample.cp, sample.rows, sample.microbatch_size, sample.num_layers, float(size.parameters_bytes))
        for quantity, value in values_of(sample).items():
            regressors = sample_regressors(quantity, sample.module, size)
            group = over(sample.link, f"{sample.module} {sample.recompute} {sample.context}")
            known = known_bytes(quantity, sample.module, size)
            found.append(Observation(quantity, group, place, regressors, value - known, size, known))
    return found


def touched_observations(samples: Sequence[ComputeSample]) -> list[Observation]:
    """Touched rows of a table: added up, and updated."""
    found = []
    for sample in samples:
        if not sample.pieces:
            continue
        place, rows_bytes = (float(sample.rows), float(sample.pieces)), sample.memory["parameters"]
        merged = merge_regressors(1, SUMMED_RANKS * sample.pieces, SUMMED_RANKS * rows_bytes)
        updated = row_update_regressors(sample.pieces, rows_bytes)
        for quantity, regressors, value in (
            ("touched_merge_s", merged, sample.forward_s),
            ("touched_update_s", updated, sample.backward_s),
        ):
            found.append(Observation(quantity, quantity, place, regressors, value))
    return found


def link_observations(profile: Profile) -> list[Observation]:
    """Messages to a neighbour, sums over groups and gathers in them."""
    found = []
    for sample in profile.comm:
        place = (sample.group_size, sample.message_bytes)
        name = over(sample.link, sample.op)
        found.append(Observation(f"{name}_s", name, place, _link_regressors(sample), sample.time_s))
    return found


def _link_regressors(sample: CommSample) -> Regressors:
    if sample.op == "p2p":
        return p2p_regressors(sample.message_bytes)
    of_group = {"all_reduce": all_reduce_regressors, "all_gather": all_gather_regressors}[sample.op]
    return of_group(sample.message_bytes, sample.group_size)


def host_observations(profile: Profile) -> list[Observation]:
    """Construction of sequences and gathering of their features."""
    return [
        Observation(
            f"{sample.op}_s",
            sample.op,
            (sample.threads, sample.targets),
            host_regressors(sample.targets, sample.threads),
            sample.time_s,
        )
        for sample in profile.host
    ]
