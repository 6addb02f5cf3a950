"""The plans that parity is shown on, and the workload that makes the bias matter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megagraph_cli.artifacts.workload import BatchSection, DatasetSection, ModelSection, Recipe, TrainSection
from megagraph_cli.layout.dims import AXES, ParallelDims, factorisations
from megagraph_cli.layout.schedules import SCHEDULES
from megagraph_cli.runtime.build import Order

ALL = os.environ.get("MGRAPH_PARITY") == "all"
"""Whether this is the whole proof (make parity), minutes longer: every plan in both number types, for all its steps."""
STEPS = 20 if ALL else 6
SPLITS = {1: [(3,)], 2: [(1, 2), (2, 1)], 3: [(1, 3, 1), (2, 1, 2)], 4: [(1, 1, 1, 2), (2, 1, 1, 1)]}
"""Layer splits by number of stages: uneven ones, with a single layer at either end; no more layers than they need."""


@dataclass(frozen=True)
class Case:
    """A plan to run in one number type; ``broken`` names a fault put in on purpose, ``embedding`` the input.

    ``dropout`` is the rate in input, residuals and attention alike.
    """

    order: Order
    dtype: str
    broken: str | None = None
    embedding: Literal["auto", "table", "both"] = "auto"
    dropout: float = 0.0

    @property
    def layers(self) -> int:
        """Of the model that the plan splits."""
        return sum(self.order.layers_per_stage)

    @property
    def alone(self) -> Case:
        """The same model in the same number type on one worker, one micro-batch at a time: what it is held against."""
        return replace(self, order=_order(ParallelDims(1, 1, 1), (self.layers,), 1, "gpipe"), broken=None)

    def __str__(self) -> str:
        order = self.order
        split = "-".join(map(str, order.layers_per_stage))
        plain = f"{order.dims} layers={split} K={order.num_microbatches} {order.schedule}"
        return f"{plain} recompute={order.recompute} {order.context} {self.dtype} dropout={self.dropout}"


def recipe(dataset: str, case: Case) -> Recipe:
    """lr 0.01, no warm-up, one global token and bias weights of size 1: a wrong bias cannot hide."""
    return Recipe(
        dataset=DatasetSection(name=dataset, split="random:0.6,0.2,0.2"),
        model=ModelSection(
            num_layers=case.layers,
            num_heads=8,
            hidden_dim=16,
            ffn_dim=12,
            dropout=case.dropout,
            attention_dropout=case.dropout,
            input_dropout=case.dropout,
            bias_powers=4,
            bias_init_std=1.0,
            embedding=case.embedding,
        ),
        batch=BatchSection(batch_size=50, num_sampled=9, num_super=2, num_global=1, eval_views=1),
        train=TrainSection.model_validate({"lr": 0.01, "warmup_epochs": 0.0, "grad_clip": 1.0, "dtype": case.dtype}),
    )


def orders(size: int) -> list[Order]:
    """Every plan of ``size`` workers for 1, 2 and 4, three plans of 3 workers and four of 8; and the lean ones."""
    return [*_plain_orders(size), *lean_orders(size)]


def lean_orders(size: int) -> list[Order]:
    """Layers run again in the backward, keys and values gathered: each alone and both, inside pipelines too."""
    lean = {
        1: [(ParallelDims(1, 1, 1), (3,), 2, "gpipe", "full", "ring")],
        2: [
            (ParallelDims(2, 1, 1), (1, 2), 4, "1f1b", "full", "ring"),
            (ParallelDims(1, 1, 2), (3,), 2, "gpipe", "full", "ring"),
            (ParallelDims(1, 1, 2), (3,), 2, "gpipe", "none", "allgather"),
        ],
        3: [(ParallelDims(1, 1, 3), (3,), 2, "gpipe", "full", "allgather")],
        4: [
            (ParallelDims(2, 1, 2), (1, 2), 4, "1f1b", "full", "ring"),
            (ParallelDims(2, 1, 2), (2, 1), 2, "gpipe", "full", "allgather"),
        ],
    }
    return [
        replace(_order(dims, split, microbatches, schedule), recompute=recompute, context=context)
        for dims, split, microbatches, schedule, recompute, context in lean.get(size, [])
    ]


def table_orders(size: int) -> list[Order]:
    """Plans that split the lookups of a table in every way: micro-batches, replicas, context ranks, stages."""
    chosen = {
        1: [(ParallelDims(1, 1, 1), (3,), 4, "gpipe")],
        2: [
            (ParallelDims(1, 2, 1), (3,), 2, "gpipe"),
            (ParallelDims(1, 1, 2), (3,), 1, "gpipe"),
            (ParallelDims(2, 1, 1), (1, 2), 4, "1f1b"),
        ],
        4: [(ParallelDims(1, 2, 2), (3,), 2, "gpipe"), (ParallelDims(2, 2, 1), (2, 1), 2, "1f1b")],
    }
    return [_order(*order) for order in chosen[size]]


def _plain_orders(size: int) -> list[Order]:
    if size == 3:
        dims = [ParallelDims(3, 1, 1), ParallelDims(1, 1, 3), ParallelDims(1, 3, 1)]
        return [_order(d, SPLITS[d.pp][0], 3, "1f1b" if d.pp > 1 else "gpipe") for d in dims]
    if size == 8:
        return [
            _order(ParallelDims(2, 2, 2), (1, 2), 2, "1f1b"),
            _order(ParallelDims(4, 1, 2), (1, 1, 1, 2), 4, "1f1b"),
            _order(ParallelDims(2, 1, 4), (2, 1), 2, "gpipe"),
            _order(ParallelDims(1, 2, 4), (3,), 1, "gpipe"),
        ]
    return list(_all_orders(size))


def _all_orders(size: int) -> Iterator[Order]:
    for dims in factorisations(size):
        for split, microbatches, schedule in product(SPLITS[dims.pp], (1, 2, 4), SCHEDULES):
            if schedule == "1f1b" and (dims.pp == 1 or microbatches < dims.pp):
                continue
            yield _order(dims, split, microbatches, schedule)


def _order(dims: ParallelDims, split: tuple[int, ...], microbatches: int, schedule: str) -> Order:
    return Order(dims, AXES, split, microbatches, schedule)
