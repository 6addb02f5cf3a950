"""The terms of the cost model: what each quantity depends on, fitted and predicted from the same regressors.

A quantity (seconds of a forward, bytes saved for the backward, ...) is a sum of coefficients times regressors. The
regressors of a size stand in one function, which the fit calls on what was measured and the prediction on what is
asked, so that the two cannot drift apart. Coefficients are never negative: a part costs nothing at worst, hence
every prediction grows with every size (paper.md, "Profile -> Model -> Search").
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.layout.halves import first_half
from megagraph_cli.layout.heads import padded_heads

POOLS = {"distinct": 1, "often": 8}
"""Micro-batches draw some rows of a graph more often than others: as if a part of them came from an eighth of it."""
Array = NDArray[np.float64]
Regressors = dict[str, Any]
"""Values by coefficient name; numbers, or arrays over the number of layers."""


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


def known_bytes(quantity: str, module: str, size: Size) -> int:
    """Bytes of a quantity that are known, not fitted: they come at once, where a module begins to work otherwise."""
    return size.held_back_bytes if (quantity, module) == ("backward_transient_bytes", "layer") else 0


def distinct(drawn: float, pool: float) -> float:
    """How many different ones of ``pool`` that many even draws are expected to be; uneven ones are fewer."""
    return drawn if math.isinf(pool) else -pool * math.expm1(-drawn / pool)


def pool_of(workload: Workload) -> float:
    """Rows of the workload's graph that have features: nodes and super nodes."""
    return math.inf if workload.graph is None else workload.graph.nodes + workload.graph.clusters


def over(link: str, name: str) -> str:
    """The name of what depends on a link: that of the network between hosts has a word more."""
    return name if link == "host" else f"{name}_{link}"


def _exchange(prefix: str, size: Size, layers: Any, context: str) -> Regressors:
    """What rows of other context ranks cost: joining, by number of other ranks, and by the rows that travel.

    Nothing at cp = 1. A ring and an all-gather have coefficients of their own, and so has the network between hosts.
    """
    if size.cp == 1:
        return {}
    hops, name = size.cp - 1, f"{prefix}.{over(size.link, context)}"
    return {name: layers, f"{name}_hop": layers * hops, f"{name}_rows": layers * hops * size.tokens}


def _stage_time(size: Size) -> Regressors:
    """Once per micro-batch and stage: the pass itself and its bias channels.

    Channels are powers of whole sequences' adjacency, of which each context rank keeps its rows.
    """
    return {
        "stage.call": 1.0,
        "stage.sequences": size.microbatch,
        "stage.rows": size.tokens,
        "stage.channels": size.scores,
    }


def _layer_own(size: Size) -> Regressors:
    """A layer's work on its own rows: what slows down where a stage leaves the cache."""
    n, part = size.layers, f"layer{size.way}"
    return {f"{part}.call": n, f"{part}.rows": n * size.tokens, f"{part}.scores": n * size.scores}


def _where(part: str, size: Size, layers: Any) -> Regressors:
    """Rows once more by where a sequence is: attention saves other things alone than over several ranks."""
    return {f"{part}.{'local' if size.cp == 1 else 'spread'}_rows": layers * size.tokens}


def _layer_saved(size: Size) -> Regressors:
    return _layer_own(size) | _where(f"layer{size.way}", size, size.layers)


def _last_layer_saved(size: Size) -> Regressors:
    return _last_layer_own(size) | _where(f"last_layer{size.way}", size, 1.0)


def layer_own_names(size: Size) -> frozenset[str]:
    """Coefficients of a middle layer's work on its own rows."""
    return frozenset(_layer_own(size))


def _layer_time(size: Size) -> Regressors:
    return _layer_own(size) | _exchange(f"layer{size.way}", size, size.layers, size.context)


def _last_layer_own(size: Size) -> Regressors:
    part = f"last_layer{size.way}"
    return {f"{part}.call": 1.0, f"{part}.rows": size.tokens, f"{part}.targets": size.microbatch}


def _last_layer_time(size: Size) -> Regressors:
    # The target row is attended to in one way, whatever the context.
    return _last_layer_own(size) | _exchange(f"last_layer{size.way}", size, 1.0, "ring")


def _input_rows(size: Size) -> Regressors:
    return {"input.call": 1.0, "input.rows": size.tokens}


def _head_targets(size: Size) -> Regressors:
    return {"head.call": 1.0, "head.targets": size.microbatch, "head.rows": size.tokens}


def _stage_saved(size: Size) -> Regressors:
    return {"stage.call": 1.0, "stage.sequences": size.microbatch, "stage.channels": size.scores}


def _distinct(size: Size) -> Regressors:
    return {f"input.{name}": size.distinct(name) for name in POOLS}


def _transient(module: str) -> Callable[[Size], Regressors]:
    """Bytes above what is live around a pass: the working set of the one module that runs, however deep the stage."""

    def regressors(size: Size) -> Regressors:
        is_layer = module in ("layer", "last_layer")
        prefix = f"{module}{size.way}" if is_layer else module
        own: Regressors = {
            f"{prefix}.call": 1.0,
            f"{prefix}.sequences": size.microbatch,
            f"{prefix}.rows": size.tokens,
            f"{prefix}.scores": size.scores,
        }
        if module == "input":
            own |= _distinct(size)
        if is_layer and size.cp > 1:
            gathered = module == "layer" and size.context == "allgather"
            # A ring holds a block or two of other ranks' rows, an all-gather those of all beside its own work's.
            own |= (
                {f"{prefix}.allgather_rows": size.cp * size.tokens, f"{prefix}.allgather_own_rows": size.tokens}
                if gathered
                else {f"{prefix}.ring_rows": size.tokens}
            )
        return own

    return regressors


def _batch(prefix: str) -> Callable[[Size], Regressors]:
    def regressors(size: Size) -> Regressors:
        own: Regressors = {f"{prefix}.sequences": size.microbatch, f"{prefix}.rows": size.tokens}
        return own | _distinct(size) if prefix == "input" else own

    return regressors


def _joined(*parts: Callable[[Size], Regressors]) -> Callable[[Size], Regressors]:
    def regressors(size: Size) -> Regressors:
        joined: Regressors = {}
        for part in parts:
            joined |= part(size)
        return joined

    return regressors


def _optimizer(size: Size) -> Regressors:
    return {"optimizer.call": 1.0, "optimizer.bytes": size.parameters_bytes}


MODULES = ("input", "layer", "last_layer", "head")
_Parts = dict[str, Callable[[Size], Regressors]]
_TIME: _Parts = {
    "stage": _stage_time,
    "layer": _layer_time,
    "last_layer": _last_layer_time,
    "input": _input_rows,
    "head": _head_targets,
}
_SAVED: _Parts = {
    "stage": _stage_saved,
    "layer": _layer_saved,
    "last_layer": _last_layer_saved,
    "input": _input_rows,
    "head": _head_targets,
}
_PARTS: dict[str, _Parts] = {
    "forward_s": _TIME,
    "backward_s": _TIME,
    "saved_bytes": _SAVED,
    "forward_transient_bytes": {name: _transient(name) for name in MODULES},
    "backward_transient_bytes": {name: _transient(name) for name in MODULES},
    "batch_bytes": {name: _batch(name) for name in MODULES},
    "optimizer_s": {"optimizer": _optimizer},
    "optimizer_transient_bytes": {"optimizer": _optimizer},
}
COMPUTE_QUANTITIES = tuple(_PARTS)
SHARED_STAGE = ("forward_s", "backward_s", "saved_bytes")
"""Quantities in which a layer sample also holds what a stage does once per micro-batch."""


def part_regressors(quantity: str, part: str, size: Size) -> Regressors:
    """Regressors of one part of a quantity: ``stage`` (once per micro-batch), a module, or ``optimizer``."""
    return _PARTS[quantity][part](size)


def sample_regressors(quantity: str, module: str, size: Size) -> Regressors:
    """Regressors of a whole measured sample: a layer sample is a stage, its own pass and channels included."""
    if quantity in SHARED_STAGE and module in ("layer", "last_layer"):
        return _joined(_PARTS[quantity]["stage"], _PARTS[quantity][module])(size)
    return part_regressors(quantity, module, size)


def p2p_regressors(message_bytes: float) -> Regressors:
    """One message to a neighbour: alpha + beta x bytes."""
    return {"call": 1.0, "bytes": message_bytes}


def all_reduce_regressors(message_bytes: Any, group_size: int) -> Regressors:
    """A sum over a group: latency and latency by hop, the ring's 2 (g - 1)/g of the bytes, and bytes by contender."""
    return _round(2 * message_bytes, group_size)


def all_gather_regressors(message_bytes: Any, group_size: int) -> Regressors:
    """As a sum, but (g - 1)/g of ``message_bytes``: of all that a rank has in the end it gave its own."""
    return _round(message_bytes, group_size)


def _round(passed_on: Any, group_size: int) -> Regressors:
    """Once round a ring of g ranks, of which each passes on (g - 1)/g of so many bytes."""
    hops = group_size - 1
    return {
        "call": 1.0,
        "hop": hops,
        "bytes": hops / group_size * passed_on,
        "contention_bytes": hops / 2 * passed_on,
    }


def host_regressors(targets: int, threads: int) -> Regressors:
    """Host work for a number of targets, shared by threads."""
    return {"call": 1.0, "targets": targets / threads}


def merge_regressors(sums: int, calls: int, merged_bytes: float) -> Regressors:
    """Touched rows added up: where each goes is found once a sum, then they are added, call by call."""
    return {"sum": sums, "call": calls, "bytes": merged_bytes}


def row_update_regressors(pieces: int, updated_bytes: float) -> Regressors:
    """Norm, clipping and update of touched rows, once, by piece, and by byte of rows."""
    return {"step": 1.0, "call": pieces, "bytes": updated_bytes}


class Design:
    """Samples of a quantity as a least-squares problem of relative residuals: small ones count as much as large."""

    def __init__(self, rows: Sequence[Regressors], measured: Sequence[float]) -> None:
        self.names = sorted({name for row in rows for name in row})
        self.matrix: Array = np.array([[float(row.get(name, 0.0)) for name in self.names] for row in rows])
        self.target: Array = np.array(measured, dtype=float)
        # A sample of zero has no relative residual; a thousandth of the typical one stands in for its size.
        typical = float(np.median(self.target[self.target > 0])) if np.any(self.target > 0) else 1.0
        self.weight: Array = 1.0 / np.maximum(self.target, typical * 1e-3)

    def solve(self, factors: Array | None = None) -> tuple[Array, Array]:
        """(coefficient by name, relative residual by sample) of the non-negative solution.

        ``factors`` multiply the entries of the matrix. A coefficient whose regressor is never other than zero is NaN.
        """
        matrix = self.matrix if factors is None else self.matrix * factors
        seen = np.abs(matrix).max(axis=0) > 0
        weighted = matrix[:, seen] * self.weight[:, None]
        # Columns differ by many orders of magnitude; without this the solver's tolerance would drop the small ones.
        scale = np.sqrt((weighted**2).sum(axis=0))
        solution, _ = nnls(weighted / scale, self.target * self.weight, maxiter=50 * max(1, len(self.names)))
        # The last digits are the linear algebra library's own; without them a cost model is the same on every machine.
        solution[solution < solution.max(initial=0.0) * 1e-12] = 0.0
        coefficients = np.full(len(self.names), np.nan)
        coefficients[seen] = solution / scale
        return coefficients, weighted @ (solution / scale) - self.target * self.weight


def fit_coefficients(rows: Sequence[Regressors], measured: Sequence[float]) -> dict[str, float]:
    """Non-negative least squares of relative residuals.

    Regressors that never differ from zero are left out of the result: they were not measured.
    """
    design = Design(rows, measured)
    found, _ = design.solve()
    return {
        name: float(f"{value:.12g}") for name, value in zip(design.names, found, strict=True) if not np.isnan(value)
    }


def evaluate(terms: Mapping[str, Mapping[str, float]], quantity: str, regressors: Regressors, *, remedy: str) -> Any:
    """Sum of coefficients times regressors.

    Raises MgraphError (exit 4), naming ``remedy``, where a coefficient was never measured.
    """
    coefficients = terms.get(quantity)
    if coefficients is None:
        raise never_measured(quantity, remedy)
    total: Any = 0.0
    for name in sorted(regressors):
        value = regressors[name]
        if name in coefficients:
            total = total + coefficients[name] * value
        elif np.any(np.asarray(value) != 0):
            raise never_measured(f"{quantity} {name}", remedy)
    return total


def profile_call(workload: Workload, device: str, sets: Sequence[str], hosts: int = 1) -> str:
    """The ``mgraph profile`` call for a workload, but for ``--gpus``; ``sets`` are its ``--set`` texts."""
    call = ["mgraph", "profile", "--dataset", workload.dataset.name]
    call += [word for text in sets for word in ("--set", text)]
    several = f" --nnodes {hosts} --node-rank I --rdzv-endpoint HOST:PORT" if hosts > 1 else ""
    return shlex.join([*call, "--device", device]) + several


def never_measured(what: str, remedy: str) -> MgraphError:
    """The error of a term that the profile does not hold."""
    return MgraphError(
        f"the profile never measured {what}, which this plan needs; run `{remedy}`, then fit again", EXIT_STALE
    )
