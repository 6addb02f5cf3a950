"""A plan but for its layer split, and what its stages cost with any number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.artifacts.plan import Dims
from megagraph_cli.cost.arrays import Array
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.layout.placement import MESH_ORDERS
from megagraph_cli.layout.schedules import SCHEDULES


class Ordered(Protocol):
    """What plans and validated plans say alike."""

    @property
    def dims(self) -> Dims: ...

    @property
    def num_microbatches(self) -> int: ...

    @property
    def schedule(self) -> str: ...

    @property
    def recompute(self) -> str: ...

    @property
    def context(self) -> str: ...

    @property
    def mesh_order(self) -> Sequence[str]: ...


@dataclass(frozen=True, order=True)
class Setting:
    """A plan but for its layer split. Its order is the one in which equal plans are preferred."""

    dims: ParallelDims
    num_microbatches: int
    schedule: str
    recompute: str = "none"
    context: str = "ring"
    order: int = 0
    """Number of the mesh order, which says what axes cross hosts where there are several."""

    @property
    def mesh_order(self) -> tuple[str, ...]:
        return MESH_ORDERS[self.order]

    @classmethod
    def of(cls, plan: Ordered) -> Setting:
        order = MESH_ORDERS.index(tuple(plan.mesh_order))
        dims = plan.dims.parallel()
        return cls(dims, plan.num_microbatches, plan.schedule, plan.recompute, plan.context, order)

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations ``stage`` holds at once."""
        return SCHEDULES[self.schedule].in_flight(stage, self.dims.pp, self.num_microbatches)


@dataclass(frozen=True, order=True)
class Role:
    """Where a stage stands: the first has the input, the last the last layer and the head."""

    first: bool
    last: bool


@dataclass(frozen=True)
class StageTables:
    """What each stage costs with 1, 2, ... layers: entry n - 1 of an array is n layers.

    ``forward_s`` and ``backward_s`` of one micro-batch; ``tail_s`` after the pipeline (gradient reduction, optimizer);
    ``need_bytes`` = peak + margin, ``peak_bytes``. Stages that stand in the same
    role share their arrays. All are non-decreasing in n; times are affine in n with one slope for every stage, but
    for what layers cost more where a stage leaves the cache: a middle stage does with more than ``break_layers`` layers
    (None: never). ``host_s`` is what the step cannot undercut: the construction of its batch. ``transfer_s`` is what
    a message between two stages takes.
    """

    setting: Setting
    forward_s: tuple[Array, ...]
    backward_s: tuple[Array, ...]
    tail_s: tuple[Array, ...]
    peak_bytes: tuple[NDArray[np.int64], ...]
    need_bytes: tuple[NDArray[np.int64], ...]
    host_s: float
    transfer_s: float
    break_layers: int | None = None

    @property
    def pp(self) -> int:
        return self.setting.dims.pp

    @property
    def width(self) -> int:
        """Most layers that one stage can hold while every other keeps one."""
        return len(self.forward_s[0])

    @property
    def num_layers(self) -> int:
        return self.width + self.pp - 1


def role_of(stage: int, pp: int) -> Role:
    return Role(first=stage == 0, last=stage == pp - 1)
