"""A stage of the graph transformer: any run of its layers, with the input layer or the head where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megagraph_cli.model.attention import Attend
from megagraph_cli.model.bias import AttentionBias
from megagraph_cli.model.blocks import Layer, LayerShape
from megagraph_cli.model.drop import INPUT
from megagraph_cli.model.embedding import Embedding, NodeInput
from megagraph_cli.model.head import Head
from megagraph_cli.model.recompute import recomputed


@dataclass(frozen=True)
class ModelShape:
    """Every size that the parameters depend on; ``table_rows`` and ``num_features`` are 0 where not used."""

    num_layers: int
    layer: LayerShape
    num_features: int
    table_rows: int
    num_global: int
    num_classes: int
    input_dropout: float


class Stage(nn.Module):
    """Layers ``layers`` of the model, on whatever device or rank.

    Parameter names are global: ``layers.5.norm1.weight`` is the same parameter in every plan. The last layer of the
    model is computed for the target row only. ``token_bias`` [G, M] is one parameter of the whole model of which
    every stage holds a copy. With ``recompute`` a layer keeps its input alone and runs again in the backward.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: range,
        attend: Attend,
        *,
        first: bool,
        last: bool,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.embedding = self._make_embedding() if first else None
        self.layers = nn.ModuleDict({str(i): Layer(shape.layer, attend, i) for i in layers})
        self.head = Head(shape.layer.hidden_dim, shape.num_classes) if last else None
        self.token_bias = nn.Parameter(torch.empty(shape.num_global, shape.layer.bias_powers))

    def _make_embedding(self) -> Embedding:
        shape = self.shape
        return Embedding(
            hidden_dim=shape.layer.hidden_dim,
            num_features=shape.num_features,
            table_rows=shape.table_rows,
            num_global=shape.num_global,
        )

    def forward(self, inputs: Tensor | NodeInput, bias: AttentionBias) -> Tensor:
        """NodeInput (first stage) or x [B, R, D] -> x [B, R, D], or class logits [B, C] on the last stage.

        With context parallelism only rank 0 of an axis owns row 0; on the others the last stage's result means
        nothing and must get no gradient.
        """
        x = self._embed(inputs, bias)
        for name, layer in self.layers.items():
            assert isinstance(layer, Layer)
            final = int(name) == self.shape.num_layers - 1
            x = self._run(layer.target if final else layer, x, bias)
        if self.head is not None:
            x = self.head(x)
        return x

    def _run(self, layer: Callable[[Tensor, AttentionBias, Tensor], Tensor], x: Tensor, bias: AttentionBias) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(x, bias, self.token_bias)
        return recomputed(layer, x, bias, self.token_bias)

    def _embed(self, inputs: Tensor | NodeInput, bias: AttentionBias) -> Tensor:
        if isinstance(inputs, Tensor):
            return inputs
        assert self.embedding is not None, "only the first stage reads node inputs"
        drop = bias.drop(self.shape.input_dropout, -1, INPUT) if self.training else None
        x: Tensor = self.embedding(inputs, drop)
        return x
