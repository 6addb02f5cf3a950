"""The whole model: its parameter count, its global names, and that cutting it into stages changes nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megagraph_cli.layout.parameters import count_parameters
from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import LocalAttend
from megagraph_cli.model.transformer import ModelShape, Stage
from tests.model.small import gradients_of, layer_shape, make_bias, make_inputs, make_stage, model_shape

# The same operations in the same order: a cut may only change the order in which token_bias gradients are added.
TOLERANCE = 1e-12
LAYOUT = RowLayout(6, 1, 2)


def built(shape: ModelShape, layers: range) -> int:
    first, last = layers.start == 0, layers.stop == shape.num_layers
    stage = Stage(shape, layers, LocalAttend(), first=first, last=last)
    return sum(parameter.numel() for parameter in stage.parameters())


def test_the_stated_model_has_583405_parameters() -> None:
    layer = layer_shape(hidden_dim=128, ffn_dim=128, num_heads=8, bias_powers=6)
    shape = model_shape(num_layers=4, layer=layer, num_features=1433, num_global=1, num_classes=7)
    assert built(shape, range(4)) == 583_405


@pytest.mark.parametrize("changes", [{}, {"num_heads": 4, "ffn_dim": 16}, {"hidden_dim": 12, "bias_powers": 1}])
@pytest.mark.parametrize("num_global", [0, 1, 3])
@pytest.mark.parametrize(("num_features", "table_rows"), [(7, 0), (0, 50), (7, 50)])
def test_every_stage_holds_the_parameters_that_are_counted_for_it(
    num_features: int, table_rows: int, num_global: int, changes: dict[str, Any]
) -> None:
    layer = layer_shape(**changes)
    shape = model_shape(layer=layer, num_features=num_features, table_rows=table_rows, num_global=num_global)
    counts = count_parameters(
        hidden_dim=layer.hidden_dim,
        ffn_dim=layer.ffn_dim,
        num_heads=layer.num_heads,
        bias_powers=layer.bias_powers,
        num_global=num_global,
        num_classes=shape.num_classes,
        num_features=num_features,
        table_rows=table_rows,
    )
    assert built(shape, range(5)) == counts.of_model(5)
    assert built(shape, range(2)) == counts.of_stage(2, first=True, last=False)
    assert built(shape, range(2, 3)) == counts.of_stage(1, first=False, last=False)
    assert built(shape, range(3, 5)) == counts.of_stage(2, first=False, last=True)


def run(cuts: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a 5-layer model cut at these layers, the boundary carrying x alone."""
    shape = model_shape(table_rows=30)
    stages = [make_stage(shape, range(*pair)) for pair in pairwise([0, *cuts, 5])]
    bias = make_bias(LAYOUT)
    x: Any = make_inputs(LAYOUT, 10, 7)
    for stage in stages:
        x = stage(x, bias)
    labels = torch.tensor([0, 3, 2])
    torch.nn.functional.cross_entropy(x, labels, reduction="sum").backward()
    return x.detach(), gradients_of(stages)


@pytest.mark.parametrize("cuts", [[1], [4], [2, 3], [1, 4]], ids=str)
def test_a_model_cut_into_stages_gives_the_same_logits_and_gradients(cuts: list[int]) -> None:
    logits, gradients = run([])
    cut_logits, cut_gradients = run(cuts)
    assert float((logits - cut_logits).abs().max()) <= TOLERANCE
    assert cut_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        assert float((gradient - cut_gradients[name]).abs().max()) <= TOLERANCE * scale, name


def test_every_parameter_has_a_gradient_that_is_not_zero() -> None:
    """But for the constants that softmax does not feel: b_bias and the keys' bias."""
    _, gradients = run([])
    for name, gradient in gradients.items():
        if not name.endswith("bias_offset"):
            assert float(gradient.abs().max()) > 1e-9, name


def test_names_are_global_and_only_the_tokens_channels_are_in_two_stages() -> None:
    shape = model_shape()
    whole = [name for name, _ in make_stage(shape, range(5)).named_parameters()]
    parts = [
        [name for name, _ in make_stage(shape, layers).named_parameters()]
        for layers in (range(2), range(2, 3), range(3, 5))
    ]
    names = [name for part in parts for name in part]
    assert set(names) == set(whole)
    assert {name for name in names if names.count(name) > 1} == {"token_bias"}
    assert all(not name.startswith(("layers.", "head")) or name in parts[2] for name in whole if "layers.4" in name)
    assert "layers.2.norm1.weight" in parts[1]


class NoAttention(LocalAttend):
    """Costs no floating-point operation."""

    def target(self, q_HB1E: Tensor, k_HBRE: Tensor, v_HBRE: Tensor, *_: Any) -> Tensor:
        assert q_HB1E.shape == (2, 3, 1, 4)
        assert k_HBRE.shape == v_HBRE.shape == (2, 3, LAYOUT.sequence_rows, 4)
        return torch.zeros_like(q_HB1E)


def test_the_last_layer_is_computed_for_the_target_alone() -> None:
    """Keys and values for all S rows, everything else for one: counted in floating-point operations."""
    batch, rows, d, f, classes = 3, LAYOUT.sequence_rows, 8, 6, 4
    stage = make_stage(model_shape(num_global=0), range(4, 5))
    attention: Any = stage.layers["4"].attention
    attention.attend = NoAttention()
    x = torch.zeros(batch, rows, d, dtype=torch.float64)
    bias = make_bias(RowLayout(8, 1, 0))
    with FlopCounterMode(display=False) as counter:
        logits = stage(x, bias)
    assert logits.shape == (batch, classes)
    linear = rows * 2 * d * d + 2 * d * d + 2 * d * f + d * classes
    assert counter.get_total_flops() == 2 * batch * linear
