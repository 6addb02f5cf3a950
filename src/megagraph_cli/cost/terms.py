"""The terms of the cost model: what each quantity depends on, fitted and predicted from the same regressors.

A quantity (seconds of a forward, bytes saved for the backward, ...) is a sum of coefficients times regressors. The
regressors of a size stand in one function, which the fit calls on what was measured and the prediction on what is
asked, so that the two cannot drift apart. Coefficients are never negative: a part costs nothing at worst, hence
every prediction grows with every size (paper.md, "Profile -> Model -> Search").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megagraph_cli.cost.arrays import Regressors
from megagraph_cli.cost.size import POOLS, Size


def known_bytes(quantity: str, module: str, size: Size) -> int:
    """Bytes of a quantity that are known, not fitted: they come at once, where a module begins to work otherwise."""
    return size.held_back_bytes if (quantity, module) == ("backward_transient_bytes", "layer") else 0


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
