"""The size of a micro-batch on a rank: what modules are measured and asked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.layout.halves import first_half
from megagraph_cli.layout.heads import padded_heads

POOLS = {"distinct": 1, "often": 8}
"""Micro-batches draw some rows of a graph more often than others: as if a part of them came from an eighth of it."""


@dataclass(frozen=True)
class Size:
    """What a module is measured or asked at.

    ``layers`` middle layers in a row (a number, or an array of them), ``microbatch`` sequences of ``rows`` rows on
    each of ``cp`` context ranks, ``parameters_bytes`` of weights (a number or an array). ``recompute`` and
    ``context`` are how layers run, as in plan.json; ``link`` is what connects the context ranks. ``pool`` is the
    number of rows that the graph has features for, ``graph_rows`` the number of rows of a sequence that are some of
    these, ``threads`` how many of a worker compute (1 where its device does), ``row_bytes`` what a kernel's gradient
    of one row's keys takes.
    """

    layers: Any = 0
    microbatch: int = 0
    rows: int = 1
    cp: int = 1
    parameters_bytes: Any = 0
    recompute: str = "none"
    context: str = "ring"
    link: str = "host"
    pool: float = math.inf
    graph_rows: float = math.inf
    threads: int = 1
    row_bytes: int = 0

    @property
    def way(self) -> str:
        """What names of coefficients of a layer's own work carry: those of layers that run again differ."""
        return "" if self.recompute == "none" else f"_{self.recompute}"

    @property
    def tokens(self) -> int:
        """Rows of a micro-batch on this rank: b R."""
        return self.microbatch * self.rows

    @property
    def drawn(self) -> int:
        """Rows of a micro-batch that are rows of the graph, on the rank that has most of them."""
        return self.microbatch * int(min(self.rows, self.graph_rows))

    def distinct(self, name: str) -> float:
        """Rows that so many even draws from a share of the graph (``POOLS``) are expected to be: each counts once."""
        return distinct(self.drawn, self.pool / POOLS[name])

    @property
    def scores(self) -> int:
        """Entries of one head's score matrix on this rank, padding included: b R (cp R)."""
        return self.tokens * self.rows * self.cp

    @property
    def held_back_bytes(self) -> int:
        """dK and dV of the first half of the sequences, which a ring's backward in halves holds to the end."""
        half = first_half(self.microbatch, self.rows, self.threads)
        whole = self.cp == 1 or self.context != "ring" or half == self.microbatch
        return 0 if whole else 2 * half * self.rows * self.row_bytes


def frame_of(workload: Workload, device: str, threads: int) -> Size:
    """What all sizes of a workload have in common; ``threads`` of a worker."""
    return Size(
        pool=pool_of(workload),
        graph_rows=workload.batch.num_sampled + workload.batch.num_super,
        threads=1 if device == "cuda" else threads,
        row_bytes=_row_bytes(workload, device),
    )


def _row_bytes(workload: Workload, device: str) -> int:
    """Of the gradient of one row's keys, as the kernel of a device leaves it."""
    model = workload.model
    if device == "cuda":
        return model.hidden_dim * (2 if workload.train.dtype == "bfloat16" else workload.itemsize_bytes)
    return padded_heads(model.num_heads) * model.hidden_dim // model.num_heads * workload.itemsize_bytes


def distinct(drawn: float, pool: float) -> float:
    """How many different ones of ``pool`` that many even draws are expected to be; uneven ones are fewer."""
    return drawn if math.isinf(pool) else -pool * math.expm1(-drawn / pool)


def pool_of(workload: Workload) -> float:
    """Rows of the workload's graph that have features: nodes and super nodes."""
    return math.inf if workload.graph is None else workload.graph.nodes + workload.graph.clusters
