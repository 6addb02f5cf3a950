"""Bytes of a stage, phase by phase: its peak is the largest phase, not the sum of what it ever holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.cost.arrays import Array
from megagraph_cli.cost.floors import FLOORS, with_floor
from megagraph_cli.cost.regression import evaluate
from megagraph_cli.cost.size import Size
from megagraph_cli.cost.terms import known_bytes, part_regressors
from megagraph_cli.cost.touched import Touched

Bytes = dict[str, int]
OPTIMIZER_MOMENTS = 2
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a stage, each an array over numbers of layers.

    ``standing`` by term: alive all through a step; ``batch``: for each of the K micro-batches; ``received`` and
    ``returned``: one x from the stage before and one gradient of x from the stage after; ``saved``: for every
    micro-batch in flight; ``forward`` and ``backward``: while one goes through; ``optimizer``: while it steps.
    ``touched``: the rows of a table that a step touches.
    """

    standing: Mapping[str, Array]
    batch: Array
    received: Array
    returned: Array
    saved: Array
    forward: Array
    backward: Array
    optimizer: Array
    touched: Touched

    def peak(self, num_microbatches: int, in_flight: int) -> NDArray[np.int64]:
        """Largest phase, whole bytes, every term rounded up."""
        forward, backward = self._boundaries(num_microbatches, in_flight)
        waiting, touched = _whole(in_flight * self.saved), self.touched
        passing = np.maximum(_whole(forward) + _whole(self.forward), _whole(backward) + _whole(self.backward))
        always = sum(map(_whole, self.standing.values()), start=_whole(num_microbatches * self.batch))
        beside_sum = np.maximum(touched.exchange_bytes, np.maximum(_whole(self.optimizer), touched.update_bytes))
        phases = np.maximum(touched.passing_bytes + waiting + passing, touched.summed_bytes + beside_sum)
        return np.asarray(always + phases, dtype=np.int64)

    def at_peak(self, num_microbatches: int, in_flight: int) -> Bytes:
        """Bytes by term in the largest phase, for a single number of layers."""
        phases = self._phases(num_microbatches, in_flight)
        whole = [{name: int(_whole(value).reshape(-1)[0]) for name, value in terms.items()} for terms in phases]
        return max(whole, key=lambda terms: sum(terms.values()))

    def _phases(self, num_microbatches: int, in_flight: int) -> list[dict[str, Array]]:
        """Bytes by term while a micro-batch goes forward, one comes back, gradients are summed, the optimizer steps.

        Dense gradients are summed in place: only the rows of a table can make their reduction the largest.
        """
        always = {**self.standing, "batch": num_microbatches * self.batch}
        waiting = {"activations": in_flight * self.saved}
        forward, backward = self._boundaries(num_microbatches, in_flight)
        rows = self.touched
        passing, summed = _named(rows.passing_bytes), _named(rows.summed_bytes)
        return [
            always | {"boundary": forward} | waiting | passing | {"working": self.forward},
            always | {"boundary": backward} | waiting | passing | {"working": self.backward},
            always | summed | {"working": np.asarray(float(rows.exchange_bytes))},
            always | summed | {"working": np.maximum(self.optimizer, rows.update_bytes)},
        ]

    def _boundaries(self, num_microbatches: int, in_flight: int) -> tuple[Array, Array]:
        """Bytes of messages while a micro-batch goes forward and while one comes back.

        From the stage after comes the next gradient, and in a backward there is also the one in use.
        """
        ahead, back = (messages_down(in_flight, num_microbatches, phase) for phase in PHASES)
        return ahead * self.received + self.returned, back * self.received + min(2, num_microbatches) * self.returned


def messages_down(in_flight: int, num_microbatches: int, phase: Phase) -> int:
    """Messages that a stage holds at once towards the stage before it: x received or to come, gradients leaving.

    The x of the micro-batches in flight and the one that is to come next; while one goes forward also the gradients of
    the last two that came back, while one comes back only that of the one before. All of them only if there are so
    many micro-batches: at either end of a step a stage has fewer x.
    """
    return min(in_flight + (3 if phase == "forward" else 2), num_microbatches)


def _named(touched_bytes: int) -> dict[str, Array]:
    """A term of stages that have a table, and of no other."""
    return {"touched": np.asarray(float(touched_bytes))} if touched_bytes else {}


def _whole(value: Array) -> NDArray[np.int64]:
    return np.asarray(np.ceil(value), dtype=np.int64)


def stage_bytes(
    terms: Mapping[str, Mapping[str, float]],
    size: Size,
    *,
    parts: Sequence[str],
    parameters: Array,
    table: int,
    touched: Touched,
    received: int,
    returned: int,
    remedy: str,
) -> RoleMemory:
    """Bytes of a stage that runs ``parts`` in this order; ``size.layers`` and ``parameters`` are arrays.

    ``received`` and ``returned`` are the bytes that come from the stage before and the stage after for one
    micro-batch. Gradients live in one flat buffer for the whole run, but for those of the ``table`` bytes of node
    embeddings, of which only the rows that a step touches exist, for the step: ``touched``.
    """
    middle = np.asarray(size.layers, dtype=float)
    one = np.ones_like(middle)
    present = {part: (middle > 0).astype(float) if part == "layer" else one for part in parts}

    def value(quantity: str, part: str) -> Array:
        regressors = part_regressors(quantity, part, size)
        asked = evaluate(terms, quantity, regressors, remedy=remedy)
        if quantity in FLOORS:
            asked = with_floor(terms, quantity, next(iter(regressors)).split(".")[0], size, asked)
        return np.asarray((asked + known_bytes(quantity, part, size)) * present.get(part, one), dtype=float)

    saved_of = {part: value("saved_bytes", part) for part in parts}
    saved_of["layer"] = saved_of["layer"] + value("saved_bytes", "stage")
    saved = sum(saved_of.values(), start=np.zeros_like(middle))
    forward = _most_held(saved_of, {part: value("forward_transient_bytes", part) for part in parts})
    backward = _most_held(saved_of, {part: value("backward_transient_bytes", part) for part in parts})
    # The table's rows are updated by themselves, from copies of the touched ones alone.
    dense = np.asarray(parameters) - table
    optimizer = part_regressors("optimizer_transient_bytes", "optimizer", Size(parameters_bytes=dense))
    step = np.asarray(evaluate(terms, "optimizer_transient_bytes", optimizer, remedy=remedy), dtype=float)
    return RoleMemory(
        standing={
            "parameters": parameters,
            "gradients": parameters - table,
            "optimizer": OPTIMIZER_MOMENTS * parameters + touched.counts_bytes,
        },
        batch=_batch_bytes({part: value("batch_bytes", part) for part in parts}) * one,
        received=received * one,
        returned=returned * one,
        saved=saved,
        forward=np.maximum(forward - saved, 0.0),
        backward=np.maximum(backward - saved, 0.0),
        optimizer=step * one,
        touched=touched,
    )


def _most_held(saved: Mapping[str, Array], transient: Mapping[str, Array]) -> Array:
    """Most bytes of one micro-batch while each module in turn adds its transient to what was saved so far."""
    held: Array = np.zeros(1)
    most: Array = np.zeros(1)
    for part, working in transient.items():
        held = held + saved[part]
        most = np.maximum(most, held + working)
    return most


def _batch_bytes(by_part: Mapping[str, Array]) -> Array:
    """A micro-batch's tensors: the topology that both kinds of layer read counts once."""
    topology = np.maximum(by_part["layer"], by_part.get("last_layer", 0.0))
    others = [value for part, value in by_part.items() if part not in ("layer", "last_layer")]
    return np.asarray(sum(others, start=topology), dtype=float)
