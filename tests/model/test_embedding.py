"""The input layer: every source of embeddings, global tokens, padding, and work done once per distinct row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.drop import Drop
from megagraph_cli.model.embedding import Embedding, NodeInput
from tests.model.small import make_inputs

# float64; a row is a sum of 7 products of size about 1.
TOLERANCE = 1e-14
ROWS, FEATURES, HIDDEN, TOKENS = 10, 7, 4, 2
LAYOUT = RowLayout(6, 1, TOKENS)


def embedding(**changes: Any) -> Embedding:
    sizes: dict[str, Any] = {
        "hidden_dim": HIDDEN,
        "num_features": FEATURES,
        "table_rows": 0,
        "num_global": TOKENS,
    }
    made = Embedding(**(sizes | changes)).to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def inputs() -> NodeInput:
    """Row 5 of the first sequence is padding."""
    nodes = make_inputs(LAYOUT, ROWS, FEATURES)
    nodes.place[0, 5] = ROWS + TOKENS
    return nodes


def as_sparse(nodes: NodeInput) -> NodeInput:
    assert nodes.dense is not None
    matrix = sparse.csr_array(nodes.dense.numpy())
    return NodeInput(
        rows=nodes.rows,
        place=nodes.place,
        columns=torch.from_numpy(matrix.indices.astype("int64")),
        offsets=torch.from_numpy(matrix.indptr.astype("int64")),
        values=torch.from_numpy(matrix.data),
    )


def row_by_row(layer: Embedding, nodes: NodeInput) -> Tensor:
    """x [B, R, D] spelled out, one row at a time."""
    out = torch.zeros((*nodes.place.shape, HIDDEN), dtype=torch.float64)
    for b, sequence in enumerate(nodes.place.tolist()):
        for r, place in enumerate(sequence):
            if place < ROWS and layer.weight is not None and nodes.dense is not None:
                out[b, r] += nodes.dense[place].double() @ layer.weight + layer.bias
            if place < ROWS and layer.table is not None:
                out[b, r] += layer.table[nodes.rows[place]]
            if ROWS <= place < ROWS + TOKENS:
                assert layer.tokens is not None
                out[b, r] = layer.tokens[place - ROWS]
    return out


@pytest.mark.parametrize(("features", "table"), [(FEATURES, 0), (0, 3 * ROWS), (FEATURES, 3 * ROWS)])
def test_features_table_and_both_are_what_the_rows_say(features: int, table: int) -> None:
    layer, nodes = embedding(num_features=features, table_rows=table), inputs()
    assert float((layer(nodes) - row_by_row(layer, nodes)).detach().abs().max()) <= TOLERANCE


def test_sparse_and_dense_features_give_the_same_rows_and_gradients() -> None:
    nodes = inputs()
    outputs, gradients = [], []
    for form in (nodes, as_sparse(nodes)):
        layer = embedding()
        x = layer(form)
        (x * torch.arange(x.numel(), dtype=torch.float64).view_as(x)).sum().backward()
        outputs.append(x.detach())
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert float((outputs[0] - outputs[1]).abs().max()) <= TOLERANCE
    for dense, other in zip(*gradients, strict=True):
        assert dense is not None
        assert other is not None
        # Gradients are sums of up to 27 rows times numbers up to 108.
        assert float((dense - other).abs().max()) <= 1e4 * TOLERANCE


def test_padding_is_zero_and_global_tokens_are_in_their_rows() -> None:
    layer, nodes = embedding(), inputs()
    x = layer(nodes).detach()
    assert layer.tokens is not None
    assert not x[0, 5].any()
    assert torch.equal(x[:, 7:], layer.tokens.detach().expand(3, TOKENS, HIDDEN))


def test_padding_has_no_gradient_and_a_row_in_many_places_gets_the_sum_of_theirs() -> None:
    layer, nodes = embedding(num_features=0, table_rows=3 * ROWS), inputs()
    layer(nodes).sum().backward()
    counts = torch.bincount(nodes.place.flatten(), minlength=ROWS + TOKENS + 1)
    expected = torch.zeros(3 * ROWS, dtype=torch.float64)
    expected[nodes.rows] = counts[:ROWS].double()
    assert layer.table is not None
    assert layer.table.grad is not None
    assert torch.equal(layer.table.grad.to_dense(), expected.unsqueeze(1).expand(-1, HIDDEN))


def test_each_distinct_row_is_embedded_once() -> None:
    """2 n F D floating-point operations, n distinct rows, however many sequences they are in."""
    nodes = inputs()
    many = replace(nodes, place=nodes.place.repeat(20, 1))
    with FlopCounterMode(display=False) as counter:
        embedding()(many)
    assert counter.get_total_flops() == 2 * ROWS * FEATURES * HIDDEN


def test_a_model_without_global_tokens_has_no_such_parameter() -> None:
    layer = embedding(num_global=0)
    nodes = make_inputs(RowLayout(6, 1, 0), ROWS, FEATURES)
    assert layer.tokens is None
    assert layer(nodes).shape == (3, 7, HIDDEN)


def test_input_dropout_drops_elements_of_rows() -> None:
    layer, nodes = embedding(), inputs()
    plain, dropped = layer(nodes), layer(nodes, Drop(0.5, 3))
    kept = dropped != 0
    assert torch.equal(dropped[kept], 2 * plain[kept])
    assert not bool(kept.all())
