"""What a plan will cost: seconds of a step and bytes of every stage, from a cost model's coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.plan import Forecast, StageForecast
from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.cost.arrays import Array
from megagraph_cli.cost.cache import CacheBreak
from megagraph_cli.cost.memory import Bytes, RoleMemory, stage_bytes
from megagraph_cli.cost.regression import evaluate
from megagraph_cli.cost.seconds import PASS, Seconds
from megagraph_cli.cost.setting import Role, Setting, StageTables, role_of
from megagraph_cli.cost.simulate import simulate
from megagraph_cli.cost.size import Size, distinct, frame_of
from megagraph_cli.cost.space import Pins, settings
from megagraph_cli.cost.terms import (
    part_regressors,
)
from megagraph_cli.cost.touched import Touched
from megagraph_cli.layout.batches import microbatch_targets, steps_per_epoch
from megagraph_cli.layout.dims import AXES
from megagraph_cli.layout.parameters import ParameterCounts
from megagraph_cli.layout.placement import Placement, hosts_of, placement
from megagraph_cli.layout.wire import ID_BYTES

SUMMARY_BYTES = 24
"""Loss, gradient norm and stop votes of a step, summed over all ranks."""


@dataclass(frozen=True)
class Predictor:
    """Predictions for one workload (the cost model's own, or that with other layers and batch size)."""

    cost_model: CostModel
    workload: Workload
    sets: tuple[str, ...] = ()
    """The ``--set`` texts with which ``mgraph profile`` measures the cost model's workload."""
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    _sizes: dict[Hashable, Size] = field(default_factory=dict, repr=False, compare=False)

    @property
    def terms(self) -> Mapping[str, Mapping[str, float]]:
        return self.cost_model.terms

    @cached_property
    def _seconds(self) -> Seconds:
        return Seconds(self.cost_model, self.sets)

    @property
    def overhead_bytes(self) -> int:
        return self.cost_model.machine.overhead_bytes

    def margin_bytes(self, peak_bytes: int) -> int:
        """What held-out measurements say a peak may be under-predicted by."""
        return math.ceil(self.terms["margin"]["relative"] * peak_bytes)

    def settings(self, gpus: int, pins: Pins) -> list[Setting]:
        """Every setting of a search, as ``space.settings``."""
        machine = self.cost_model.machine
        return settings(self.workload, gpus, pins, machine.hosts, machine.num_devices // machine.hosts)

    def _placement(self, setting: Setting) -> Placement:
        hosts = hosts_of(setting.dims.size, self.cost_model.machine.hosts)
        return placement(setting.dims, setting.mesh_order, hosts)

    def _link(self, setting: Setting, *axes: str) -> str:
        """What the slowest of the connections along some axes goes over."""
        if self.cost_model.machine.hosts == 1:
            return "host"
        return "network" if self._placement(setting).crossing.intersection(axes) else "host"

    def size(self, setting: Setting, layers: Any = 0) -> Size:
        """A micro-batch of the setting, through ``layers`` middle layers."""
        link = self._link(setting, "cp")
        key = (setting.dims, setting.num_microbatches, setting.recompute, setting.context, link)
        if key not in self._sizes:
            dims = setting.dims
            targets = microbatch_targets(self.workload.batch.batch_size, dims.dp, setting.num_microbatches)
            rows = self.workload.batch.rows(dims.cp).rows_per_rank
            self._sizes[key] = replace(
                self._frame,
                microbatch=targets,
                rows=rows,
                cp=dims.cp,
                recompute=setting.recompute,
                context=setting.context,
                link=link,
            )
        return self._sizes[key] if isinstance(layers, int) and not layers else replace(self._sizes[key], layers=layers)

    @cached_property
    def _frame(self) -> Size:
        return frame_of(self.workload, self.cost_model.machine.device, self.cost_model.threads)

    @cached_property
    def _cache(self) -> CacheBreak | None:
        return CacheBreak.of(self.terms)

    @cached_property
    def _counts(self) -> ParameterCounts:
        return self.workload.parameters()

    def parts_of(self, role: Role) -> list[str]:
        """Modules of a stage in the order of its forward."""
        return ["input"] * role.first + ["layer"] + ["last_layer", "head"] * role.last

    def pass_s(self, quantity: str, setting: Setting, role: Role, layers: Array) -> Array:
        """Seconds of one micro-batch's ``forward_s`` or ``backward_s`` through a stage with ``layers`` layers."""
        parts = self.pass_parts(quantity, setting, role, layers).values()
        return np.asarray(sum(parts, start=np.zeros(len(layers))), dtype=float)

    def pass_parts(self, quantity: str, setting: Setting, role: Role, layers: Array) -> dict[str, Array]:
        """Seconds of one micro-batch by part: ``stage`` (its bias channels among it), every module, and of a table
        ``merge``: its rows added to those of the micro-batches before.
        """
        size = self.size(setting, layers - role.last)
        parts = {}
        for part in ["stage", *self.parts_of(role)]:
            regressors = part_regressors(quantity, part, size)
            if self._cache is not None and part == "layer":
                regressors = self._cache.applied(regressors, size)
            asked = evaluate(self.terms, quantity, regressors, remedy=self._seconds.remedy(min(size.cp, 2)))
            parts[part] = self._seconds.calibrated(PASS, np.zeros(len(layers)) + asked)
        if (touched := self.touched(setting, role)).rows:
            merged_bytes = distinct(size.drawn, touched.table_rows) * touched.row_bytes
            asked = self._seconds.merge(0, 1, merged_bytes) if quantity == "backward_s" else 0.0
            parts["merge"] = self._seconds.calibrated(PASS, np.zeros(len(layers)) + asked)
        return parts

    def p2p_s(self, setting: Setting) -> float:
        """Seconds of one micro-batch's boundary activation between two stages; 0 with one stage."""
        if setting.dims.pp == 1:
            return 0.0
        message = boundary_bytes(self.workload, self.size(setting))
        return self._seconds.message(message, self._link(setting, "pp"))

    def parameters_bytes(self, role: Role, layers: Array) -> Array:
        """Bytes of a stage's weights."""
        held = self._counts.of_stage(layers, first=role.first, last=role.last)
        return held * self.workload.itemsize_bytes

    def touched(self, setting: Setting, role: Role) -> Touched:
        """The rows of its table that a rank of a stage touches in a step: no more than even draws would."""
        model = self.workload.model
        table_rows = self._counts.table // model.hidden_dim
        if not (role.first and table_rows):
            return Touched()
        lookups = self.size(setting).drawn * setting.num_microbatches
        rows, sharers = math.ceil(distinct(lookups, table_rows)), setting.dims.dp * setting.dims.cp
        return Touched(
            rows, sharers, table_rows, model.hidden_dim, self.workload.itemsize_bytes, self.cost_model.machine.device
        )

    def reduced_bytes(self, role: Role, layers: Array) -> Array:
        """Bytes of a stage's gradients that are summed over dp x cp: all but those of its table of node embeddings."""
        return self.parameters_bytes(role, layers) - self._counts.table * self.workload.itemsize_bytes * role.first

    def tail_s(self, setting: Setting, role: Role, layers: Array) -> Array:
        """Seconds after the pipeline, for each number of layers."""
        parts = self.tail_parts(setting, role, layers).values()
        return np.asarray(sum(parts, start=np.zeros(len(layers))), dtype=float)

    def tail_parts(self, setting: Setting, role: Role, layers: Array) -> dict[str, Array]:
        """Seconds by term: gradients summed over dp x cp, shared ones over pp and the norm, the optimizer.

        Of a table ``touched``: where its rows go is found as a step begins, all ranks' rows are added up, and updated.
        On a CPU also those of the next batch's construction.
        """
        dims, zero = setting.dims, np.zeros(len(layers))
        sharers = dims.dp * dims.cp
        held, touched = self.reduced_bytes(role, layers), self.touched(setting, role)
        regressors = part_regressors("optimizer_s", "optimizer", Size(parameters_bytes=held))
        parts = {"optimizer": zero + evaluate(self.terms, "optimizer_s", regressors, remedy=self._seconds.remedy())}
        if touched.rows:
            sums, calls = 1 + bool(touched.gathers), sharers * touched.gathers
            seconds = self._seconds.merge(sums, calls, touched.merged_bytes)
            seconds += self._seconds.update_rows(touched.updates, touched.updated_bytes)
            parts["touched"] = zero + seconds
        if sharers > 1:
            link = self._link(setting, "dp", "cp")
            parts["reduction"] = zero + self._seconds.all_reduce(held, sharers, link)
            if touched.gathers:
                # How many rows is agreed on first, by a sum that is all latency.
                parts["reduction"] += self._seconds.all_reduce(ID_BYTES, sharers, link)
                parts["reduction"] += self._seconds.all_gather(touched.gathered_ids_bytes, sharers, link)
                parts["reduction"] += touched.gathers * self._seconds.all_gather(touched.gathered_bytes, sharers, link)
        if dims.size > 1:
            norm = zero + self._seconds.all_reduce(SUMMARY_BYTES, dims.size, self._link(setting, *AXES))
            if dims.pp > 1:
                shared = self._counts.shared * self.workload.itemsize_bytes
                norm = norm + self._seconds.all_reduce(shared, dims.pp, self._link(setting, "pp"))
            parts["norm"] = norm
        if self.host_shares_cores:
            parts["construction"] = zero + self.host_s(setting)
        return parts

    @property
    def host_shares_cores(self) -> bool:
        """On a CPU the next batch is built by the cores that compute this one: only what a rank waits for others, with
        which that begins, hides any of it."""
        return self.cost_model.machine.device == "cpu"

    def host_s(self, setting: Setting) -> float:
        """Seconds in which a rank's host threads build the batch of one step: its share of the replica's sequences,
        which the ranks of a replica on one host share out, and the features that it embeds."""
        targets = self.size(setting).microbatch * setting.num_microbatches
        return self._seconds.construction(-(-targets // self._placement(setting).peers), targets)

    def _floor_s(self, setting: Setting) -> float:
        """What a step cannot undercut where the host works beside the device: the construction of its batch."""
        return 0.0 if self.host_shares_cores else self.host_s(setting)

    def memory(self, setting: Setting, role: Role, layers: Array) -> RoleMemory:
        """Bytes of a stage by phase and term, for each number of layers."""
        return stage_bytes(
            self.terms,
            self.size(setting, layers - role.last),
            parts=self.parts_of(role),
            parameters=self.parameters_bytes(role, layers),
            table=self._counts.table * self.workload.itemsize_bytes * role.first,
            touched=self.touched(setting, role),
            received=boundary_bytes(self.workload, self.size(setting)) * (not role.first),
            returned=boundary_bytes(self.workload, self.size(setting)) * (not role.last),
            remedy=self._seconds.remedy(min(setting.dims.cp, 2)),
        )

    def tables(self, setting: Setting) -> StageTables:
        """Costs of every stage for every number of layers it may hold."""
        pp = setting.dims.pp
        width = self.workload.model.num_layers - pp + 1
        roles = [role_of(stage, pp) for stage in range(pp)]
        flights = [setting.in_flight(stage) for stage in range(pp)]
        times = {role: self._role_times(setting, role, width) for role in set(roles)}
        sizes = {key: self._role_bytes(setting, *key, width) for key in set(zip(roles, flights, strict=True))}
        places = list(zip(roles, flights, strict=True))
        return StageTables(
            setting=setting,
            forward_s=tuple(times[role][0] for role in roles),
            backward_s=tuple(times[role][1] for role in roles),
            tail_s=tuple(times[role][2] for role in roles),
            peak_bytes=tuple(sizes[place][0] for place in places),
            need_bytes=tuple(sizes[place][1] for place in places),
            host_s=self._floor_s(setting),
            transfer_s=self.p2p_s(setting),
            break_layers=None if self._cache is None else self._cache.break_layers(self.size(setting)),
        )

    @cached_property
    def _every_layers(self) -> Array:
        return np.arange(1, self.workload.model.num_layers + 1, dtype=float)

    def _kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Worked out once for all settings that ask for the same, for every number of layers of the model."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _role_times(self, setting: Setting, role: Role, width: int) -> tuple[Array, Array, Array]:
        size, layers = self.size(setting), self._every_layers
        forward, backward = (
            self._kept((name, role, size), lambda name=name: self.pass_s(name, setting, role, layers))  # type: ignore[misc]
            for name in ("forward_s", "backward_s")
        )
        batch = setting.num_microbatches * size.microbatch
        tail = self._kept(
            ("tail", role, setting.dims, setting.order, batch), lambda: self.tail_s(setting, role, layers)
        )
        return forward[:width], backward[:width], tail[:width]

    def _role_bytes(
        self, setting: Setting, role: Role, in_flight: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(peak, peak and margin)."""
        size, count = self.size(setting), setting.num_microbatches
        touched = self.touched(setting, role)

        def peak_and_margin() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            memory = self._kept(("memory", role, size, touched), lambda: self.memory(setting, role, self._every_layers))
            peak = memory.peak(count, in_flight)
            margin = np.ceil(self.terms["margin"]["relative"] * peak).astype(np.int64)
            return peak, peak + margin

        peak, need = self._kept(("bytes", role, size, touched, count, in_flight), peak_and_margin)
        return peak[:width], need[:width]

    def step_s(self, setting: Setting, split: Sequence[int]) -> float:
        """Seconds of a step of one plan."""
        pp, count = setting.dims.pp, setting.num_microbatches
        forward, backward, tails = [], [], []
        for stage, held in enumerate(split):
            role, layers = role_of(stage, pp), np.array([float(held)])
            forward.append(float(self.pass_s("forward_s", setting, role, layers)[0]))
            backward.append(float(self.pass_s("backward_s", setting, role, layers)[0]))
            tails.append(float(self.tail_s(setting, role, layers)[0]))
        timeline = simulate(forward, backward, self.p2p_s(setting), count, setting.schedule)
        return max(timeline.makespan_s + max(tails), self._floor_s(setting))

    def forecast(self, setting: Setting, split: Sequence[int]) -> Forecast:
        """Step, epoch and every stage's seconds and bytes of one plan."""
        pp, count = setting.dims.pp, setting.num_microbatches
        forward, backward, tails, stages_bytes = [], [], [], []
        for stage, held in enumerate(split):
            role, layers = role_of(stage, pp), np.array([float(held)])
            forward.append(float(self.pass_s("forward_s", setting, role, layers)[0]))
            backward.append(float(self.pass_s("backward_s", setting, role, layers)[0]))
            tails.append(float(self.tail_s(setting, role, layers)[0]))
            held_bytes = self.memory(setting, role, layers)
            stages_bytes.append(held_bytes.at_peak(count, setting.in_flight(stage)))
        step_s = self.step_s(setting, split)
        busy = [count * (f + b) + tail for f, b, tail in zip(forward, backward, tails, strict=True)]
        peak = max(total_bytes(terms) for terms in stages_bytes)
        graph = self.workload.graph
        assert graph is not None, "a forecast needs the prepared graph"
        return Forecast(
            step_s=step_s,
            epoch_s=steps_per_epoch(graph.train, self.workload.batch.batch_size) * step_s,
            peak_bytes=peak,
            overhead_bytes=self.overhead_bytes,
            margin_bytes=self.margin_bytes(peak),
            stages=[StageForecast(time_s=s, memory_bytes=m) for s, m in zip(busy, stages_bytes, strict=True)],
        )


def boundary_bytes(workload: Workload, size: Size) -> int:
    """Bytes of one micro-batch's activation between stages: b x ceil(S / cp) x d."""
    return size.tokens * workload.model.hidden_dim * workload.itemsize_bytes


def total_bytes(terms: Bytes) -> int:
    return sum(terms.values())
