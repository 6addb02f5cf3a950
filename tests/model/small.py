"""Small random micro-batches and models, float64, with numpy references that share no code with the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import LocalAttend
from megagraph_cli.model.bias import AttentionBias, Topology, build_bias
from megagraph_cli.model.blocks import LayerShape
from megagraph_cli.model.embedding import NodeInput
from megagraph_cli.model.init import initialise
from megagraph_cli.model.transformer import ModelShape, Stage


def make_topology(layout: RowLayout, batch: int = 3, seed: int = 0) -> Topology:
    """Random induced graphs; the last sequence has fewer nodes than rows, and nodes share clusters."""
    rng = np.random.default_rng(seed)
    nodes, supers = layout.num_sampled, layout.num_super
    real = np.ones((batch, nodes + supers), dtype=np.bool_)
    real[-1, max(1, nodes // 2) : nodes] = False
    clusters = nodes + supers if supers else 0
    index = rng.integers(0, max(1, clusters // 2), (batch, clusters))
    index[:, nodes:] = np.arange(supers)  # a sequence's super nodes are distinct
    index[~real[:, :clusters]] = 0
    node_bits, node_scale = _graphs(rng, batch, nodes, real[:, :nodes])
    coarse_bits, coarse_scale = _graphs(rng, batch, clusters, np.ones((batch, clusters), dtype=np.bool_))
    arrays = (node_bits, node_scale, coarse_bits, coarse_scale, index.astype(np.int16), real)
    return Topology(*(torch.from_numpy(array) for array in arrays))


def _graphs(
    rng: np.random.Generator, batch: int, size: int, real: NDArray[np.bool_]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bits of A + I and (degree + 1)^-1/2, the degree being that of a larger graph."""
    upper = np.triu(rng.random((batch, size, size)) < 0.5, 1)
    closed = (upper | upper.transpose(0, 2, 1) | np.eye(size, dtype=np.bool_)) & real[:, :, None] & real[:, None, :]
    degree = closed.sum(2) + rng.integers(0, 5, (batch, size))
    scale = np.where(real, np.maximum(degree, 1) ** -0.5, 0).astype(np.float32)
    return np.packbits(closed, axis=-1, bitorder="little"), scale


def dense_channels(topology: Topology, layout: RowLayout, powers: int) -> NDArray[np.float64]:
    """Channels [M, B, S, S] by matrix powers, from bits and scales, zero where a global token takes part."""
    nodes, known = layout.num_sampled, layout.num_sampled + layout.num_super
    batch, rows = topology.node_bits.shape[0], layout.sequence_rows
    out = np.zeros((powers, batch, rows, rows))
    for b in range(batch):
        node = _dense(topology.node_bits[b], topology.node_scale[b])
        coarse = _dense(topology.coarse_bits[b], topology.coarse_scale[b])
        place = topology.coarse_index[b].numpy().astype(int)
        for m in range(powers):
            out[m, b, :nodes, :nodes] = np.linalg.matrix_power(node, m + 1)
            if layout.num_super:
                pairs = np.linalg.matrix_power(coarse, m + 1)[np.ix_(place, place)]
                out[m, b, nodes:known, :known] = pairs[nodes:]
                out[m, b, :known, nodes:known] = pairs[:, nodes:]
    return out


def _dense(bits: Tensor, scale: Tensor) -> NDArray[np.float64]:
    weights = scale.numpy().astype(np.float64)
    dense = np.unpackbits(bits.numpy(), axis=-1, bitorder="little")[:, : weights.size]
    matrix: NDArray[np.float64] = dense * weights[:, None] * weights[None, :]
    return matrix


def make_bias(layout: RowLayout, *, batch: int = 3, powers: int = 3, drop_seed: int = 0) -> AttentionBias:
    """The bias of whole random sequences (cp = 1)."""
    return build_bias(
        make_topology(layout, batch), layout, 0, powers=powers, scale=1.0, dtype=torch.float64, drop_seed=drop_seed
    )


def make_inputs(layout: RowLayout, num_rows: int, num_features: int, *, batch: int = 3, seed: int = 0) -> NodeInput:
    """Sequences over ``num_rows`` dense feature rows, many in several sequences; global tokens in their places."""
    rng = np.random.default_rng(seed)
    place = rng.integers(0, num_rows, (batch, layout.sequence_rows))
    place[:, layout.num_sampled + layout.num_super :] = num_rows + np.arange(layout.num_global)
    x = rng.normal(size=(num_rows, num_features)) * (rng.random((num_rows, num_features)) < 0.4)
    return NodeInput(
        rows=torch.from_numpy(np.sort(rng.permutation(3 * num_rows)[:num_rows])),
        place=torch.from_numpy(place),
        dense=torch.from_numpy(x.astype(np.float32)),
    )


def layer_shape(**changes: Any) -> LayerShape:
    sizes: dict[str, Any] = {
        "hidden_dim": 8,
        "ffn_dim": 6,
        "num_heads": 2,
        "bias_powers": 3,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return LayerShape(**(sizes | changes))


def model_shape(**changes: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "layer": layer_shape(),
        "num_features": 7,
        "table_rows": 0,
        "num_global": 2,
        "num_classes": 4,
        "input_dropout": 0.0,
    }
    return ModelShape(**(sizes | changes))


def make_stage(shape: ModelShape, layers: range, *, rng_seed: int = 0) -> Stage:
    """A stage in float64 with weights large enough that every one of them matters."""
    first, last = layers.start == 0, layers.stop == shape.num_layers
    stage = Stage(shape, layers, LocalAttend(), first=first, last=last).to(torch.float64)
    initialise(stage, rng_seed, 1.0)
    return stage


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    """Gradients by global name, copies of one parameter added up."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            total[name] = total[name] + grad if name in total else grad
    return total
