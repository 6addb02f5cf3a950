"""A micro-batch as tensors on this rank's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.graph.batch import InputRows, MicroBatch
from megagraph_cli.model.bias import Topology
from megagraph_cli.model.embedding import NodeInput


@dataclass(frozen=True)
class DeviceBatch:
    """One micro-batch on the device; ``nodes`` only on the first stage."""

    topology: Topology
    labels: Tensor
    nodes: NodeInput | None

    def tensors(self) -> list[Tensor]:
        """All its tensors."""
        parts = [*vars(self.topology).values(), self.labels, *(vars(self.nodes).values() if self.nodes else ())]
        return [part for part in parts if isinstance(part, Tensor)]


def to_device(batch: MicroBatch, device: torch.device) -> DeviceBatch:
    """Copies from pinned memory without waiting on cuda; on cpu shares the arrays' memory."""
    move = _Mover(device)
    sequences = batch.sequences
    return DeviceBatch(
        topology=Topology(
            node_bits=move(sequences.node_bits),
            node_scale=move(sequences.node_scale),
            coarse_bits=move(sequences.coarse_bits),
            coarse_scale=move(sequences.coarse_scale),
            coarse_index=move(sequences.coarse_index),
            real=move(batch.real),
        ),
        labels=move(batch.labels),
        nodes=None if batch.inputs is None else _node_input(batch.inputs, move),
    )


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @overload
    def __call__(self, array: NDArray[Any]) -> Tensor: ...
    @overload
    def __call__(self, array: None) -> None: ...
    def __call__(self, array: NDArray[Any] | None) -> Tensor | None:
        if array is None:
            return None
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _node_input(inputs: InputRows, move: _Mover) -> NodeInput:
    return NodeInput(
        rows=move(inputs.rows),
        place=move(inputs.place),
        dense=move(inputs.dense),
        columns=move(inputs.columns),
        offsets=move(inputs.offsets),
        values=move(inputs.values),
    )
