"""Synthetic profiles whose every measurement comes from known coefficients: what a fit must find again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megagraph_cli.artifacts.profile import CommSample, ComputeSample, HostSample, Machine, Profile
from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.runtime.grid import PLAIN, Grid, Sizes, touched_sizes, ways

SEQUENCE_ROWS = 17


def workload(num_layers: int = 4, batch_size: int = 256, **model: Any) -> Workload:
    """A small workload: sequences of 17 rows, hidden size 32."""
    return Workload.model_validate(
        {
            "dataset": {"name": "demo"},
            "model": {"num_layers": num_layers, "num_heads": 4, "hidden_dim": 32, "ffn_dim": 32} | model,
            "batch": {"batch_size": batch_size},
            "train": {},
            "graph": {
                "digest": "0" * 64,
                "nodes": 2000,
                "edges": 8000,
                "features": 24,
                "feature_density": 0.5,
                "classes": 5,
                "clusters": 200,
                "train": 1200,
                "val": 400,
                "test": 400,
            },
        }
    )


@dataclass(frozen=True)
class Planted:
    """The truth behind a profile. Times in seconds, sizes in bytes; ``*_row`` per row of a micro-batch.

    With a cache break it is measured at the sizes that ``mgraph profile`` takes.
    """

    layer_call_s: float = 2e-4
    layer_row_s: float = 1e-6
    hop_s: float = 5e-5
    hop_row_s: float = 2e-8
    stage_call_s: float = 1e-4
    stage_row_s: float = 4e-7
    last_call_s: float = 1e-4
    last_row_s: float = 3e-7
    input_call_s: float = 3e-5
    input_row_s: float = 2e-7
    head_call_s: float = 2e-5
    head_target_s: float = 6e-7
    backward_factor: float = 2.0
    optimizer_call_s: float = 1e-4
    optimizer_byte_s: float = 3e-10
    merge_sum_s: float = 7e-5
    merge_call_s: float = 2e-5
    merge_byte_s: float = 6e-10
    update_step_s: float = 5e-5
    update_call_s: float = 1.5e-4
    update_byte_s: float = 2e-9
    p2p_call_s: float = 8e-5
    p2p_byte_s: float = 1e-9
    reduce_hop_s: float = 6e-5
    reduce_byte_s: float = 8e-10
    join_hop_s: float = 9e-5
    join_byte_s: float = 1.3e-9
    construct_target_s: float = 4e-6
    gather_target_s: float = 1e-6
    layer_row_bytes: float = 900.0
    channel_score_bytes: float = 24.0
    last_row_bytes: float = 500.0
    input_row_bytes: float = 220.0
    head_target_bytes: float = 300.0
    working_row_bytes: float = 700.0
    batch_row_bytes: float = 24.0
    gather_s: float = 4e-5
    gather_row_s: float = 1.5e-8
    kept_row_bytes: float = 130.0
    cache_penalty: float = 1.0
    cache_break_layers: int = 0
    overhead_bytes: int = 200_000_000
    memory_bytes: int = 4_000_000_000

    def forward_s(self, module: str, layers: int, b: int, rows: int, cp: int, context: str = "ring") -> float:
        tokens, hops = b * rows, cp - 1
        stage = self.stage_call_s + self.stage_row_s * tokens
        ring = hops * (self.hop_s + self.hop_row_s * tokens)
        gathered = hops * (self.gather_s + self.gather_row_s * tokens)
        if module == "layer":
            own = self.layer_call_s + self.layer_row_s * tokens
            own *= self.cache_penalty if self.cache_break_layers and layers > self.cache_break_layers else 1.0
            return stage + layers * (own + (ring if context == "ring" else gathered))
        if module == "last_layer":
            return stage + self.last_call_s + self.last_row_s * tokens + ring
        if module == "input":
            return self.input_call_s + self.input_row_s * tokens
        return self.head_call_s + self.head_target_s * b

    def backward_s(self, forward_s: float, b: int, rows: int, recompute: str) -> float:
        """Layers that run again take their forward once more, but not their stage's channels."""
        again = forward_s - self.stage_call_s - self.stage_row_s * b * rows if recompute == "full" else 0.0
        return self.backward_factor * forward_s + again

    def saved_bytes(self, module: str, layers: int, b: int, rows: int, cp: int, recompute: str = "none") -> float:
        tokens = b * rows
        channels = self.channel_score_bytes * tokens * rows * cp
        if module == "layer":
            return channels + layers * tokens * (self.layer_row_bytes if recompute == "none" else self.kept_row_bytes)
        if module == "last_layer":
            return channels + tokens * (self.last_row_bytes if recompute == "none" else self.kept_row_bytes)
        return self.input_row_bytes * tokens if module == "input" else self.head_target_bytes * b


PLAIN_SIZES = Sizes((1, 2, 4), (4, 8, 16, 32, 64))
"""What is measured every way where nothing that only depth shows is planted."""


def profile(truth: Planted | None = None, *, gpus: int = 4, work: Workload | None = None) -> Profile:
    """A whole profile of ``truth`` on ``gpus`` devices."""
    truth = truth or Planted()
    work = work or workload()
    return Profile(
        workload=work,
        machine=Machine(
            hosts=1,
            device="cpu",
            num_devices=gpus,
            memory_bytes=truth.memory_bytes,
            overhead_bytes=truth.overhead_bytes,
            backend="gloo",
            torch="2.13.0",
        ),
        compute=_compute(truth, work, gpus),
        comm=_comm(truth, gpus) if gpus > 1 else [],
        host=_host(truth),
    )


def stretched(sample: Any, factor: float) -> Any:
    """The same sample over the network."""
    if isinstance(sample, CommSample):
        seconds = sample.time_s * factor
        return sample.model_copy(update={"link": "network", "time_s": seconds, "samples_s": [seconds] * 3})
    passes = {"forward_s": sample.forward_s * factor, "backward_s": sample.backward_s * factor}
    return sample.model_copy(update={"link": "network"} | passes)


def two_hosts(*, p2p: float = 1.0, reduce: float = 1.0, ring: float = 1.0) -> Profile:
    """Four workers on two hosts; what the network between these takes, as multiples of what a host takes."""
    one = profile(gpus=4)
    slow = {"p2p": p2p, "all_reduce": reduce, "all_gather": reduce}
    comm = [each for each in one.comm if each.group_size == 2]
    comm += [stretched(each, slow[each.op]) for each in one.comm if each.group_size % 2 == 0]
    compute = [each for each in one.compute if each.cp <= 2]
    layers = [each for each in one.compute if each.cp > 1 and each.module in ("layer", "last_layer")]
    compute += [stretched(each, ring) for each in layers]
    machine = one.machine.model_copy(update={"hosts": 2})
    return one.model_copy(update={"machine": machine, "comm": comm, "compute": compute})


def _compute(truth: Planted, work: Workload, gpus: int) -> list[ComputeSample]:
    counts, item = work.parameters(), work.itemsize_bytes
    grid = Grid.of(work.batch.batch_size, work.model.num_layers, quick=False, largest=64)
    samples = []
    for cp in range(1, gpus + 1):
        rows = work.batch.rows(cp).rows_per_rank
        for way in ways(cp):
            sizes = grid.sizes(way, cp) if truth.cache_break_layers else PLAIN_SIZES
            for layers in (*sizes.layers, *sizes.deep):
                size = (layers * counts.layer + counts.shared) * item
                for b in sizes.microbatches_of(layers):
                    samples.append(_sample(truth, "layer", layers, b, rows, cp, size, *way))
            for b in sizes.microbatches:
                if way.context == "ring":
                    size = (counts.layer + counts.shared) * item
                    samples.append(_sample(truth, "last_layer", 1, b, rows, cp, size, way.recompute))
                if way == PLAIN:
                    samples.append(_sample(truth, "input", 0, b, rows, cp, counts.input * item))
                    samples.append(_sample(truth, "head", 0, b, rows, cp, counts.head * item))
    for layers in (1, 2, 4, 8):
        size = counts.of_stage(layers, first=True, last=True) * item
        seconds = truth.optimizer_call_s + truth.optimizer_byte_s * size
        samples.append(
            ComputeSample(
                module="optimizer",
                num_layers=layers,
                cp=1,
                rows=1,
                sequence_rows=SEQUENCE_ROWS,
                microbatch_size=0,
                forward_s=0.0,
                backward_s=seconds,
                memory={"parameters": size, "saved": 0, "forward_peak": 0, "backward_peak": 0, "batch": 0},
                samples_s=[[0.0, seconds]] * 3,
            )
        )
    return samples + (_touched(truth, work) if counts.table else [])


def _touched(truth: Planted, work: Workload) -> list[ComputeSample]:
    """Two ranks' rows added up, one's updated: as many as a whole batch can touch, and fewer."""
    dim = work.model.hidden_dim
    most = min(work.parameters().table // dim, 2 * work.batch.batch_size * SEQUENCE_ROWS)
    samples = []
    for rows, pieces in touched_sizes(most, dim, "cpu"):
        size = rows * dim * work.itemsize_bytes
        merge = truth.merge_sum_s + 2 * (truth.merge_call_s * pieces + truth.merge_byte_s * size)
        update = truth.update_step_s + truth.update_call_s * pieces + truth.update_byte_s * size
        samples.append(
            ComputeSample(
                module="optimizer",
                num_layers=0,
                cp=1,
                rows=rows,
                sequence_rows=SEQUENCE_ROWS,
                microbatch_size=0,
                forward_s=merge,
                backward_s=update,
                memory={"parameters": size},
                samples_s=[[merge, update]] * 3,
                pieces=pieces,
            )
        )
    return samples


def _sample(
    truth: Planted,
    module: Any,
    layers: int,
    b: int,
    rows: int,
    cp: int,
    size: int,
    recompute: Any = "none",
    context: Any = "ring",
) -> ComputeSample:
    forward = truth.forward_s(module, layers, b, rows, cp, context)
    backward = truth.backward_s(forward, b, rows, recompute)
    saved = round(truth.saved_bytes(module, layers, b, rows, cp, recompute))
    working = round(truth.working_row_bytes * b * rows)
    again = round(truth.layer_row_bytes * b * rows) if recompute == "full" else 0
    return ComputeSample(
        module=module,
        num_layers=layers,
        cp=cp,
        rows=rows,
        sequence_rows=SEQUENCE_ROWS,
        microbatch_size=b,
        recompute=recompute,
        context=context,
        forward_s=forward,
        backward_s=backward,
        memory={
            "parameters": size,
            "saved": saved,
            "forward_peak": saved + working,
            "backward_peak": 2 * working + again,
            "batch": round(truth.batch_row_bytes * b * rows) if module != "head" else 8 * b,
        },
        samples_s=[[forward, backward]] * 3,
    )


def _comm(truth: Planted, gpus: int) -> list[CommSample]:
    samples = []
    for size in (1024, 16_384, 262_144, 4_194_304):
        seconds = truth.p2p_call_s + truth.p2p_byte_s * size
        samples.append(_message("p2p", "pp", 2, size, seconds))
        for group in range(2, gpus + 1):
            seconds = truth.reduce_hop_s * (group - 1) + truth.reduce_byte_s * 2 * (group - 1) / group * size
            samples.append(_message("all_reduce", "dp", group, size, seconds))
            seconds = truth.join_hop_s * (group - 1) + truth.join_byte_s * (group - 1) / group * size
            samples.append(_message("all_gather", "dp", group, size, seconds))
    return samples


def _message(op: Any, axis: Any, group: int, size: int, seconds: float) -> CommSample:
    return CommSample(
        op=op, axis=axis, group_size=group, link="host", message_bytes=size, time_s=seconds, samples_s=[seconds] * 3
    )


def _host(truth: Planted) -> list[HostSample]:
    samples = []
    for targets in (32, 64, 128, 256):
        for op, each in (("construct", truth.construct_target_s), ("gather", truth.gather_target_s)):
            seconds = each * targets
            samples.append(
                HostSample(
                    op=op,  # type: ignore[arg-type]
                    targets=targets,
                    sequence_rows=SEQUENCE_ROWS,
                    threads=1,
                    time_s=seconds,
                    samples_s=[seconds] * 3,
                )
            )
    return samples
