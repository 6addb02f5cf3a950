"""The target row's probabilities are those that its attention output is made of, on every context rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import LocalAttend
from megagraph_cli.model.target_scores import LocalRow, node_scores, target_probabilities
from tests.model.cases import bias_of, make_case, share

# Sums of at most 12 float64 products, in another order.
TOLERANCE = 1e-12
SEQUENCE = (8, 2, 2)


@pytest.mark.parametrize("num_global", [0, 2])
def test_probabilities_times_values_are_the_targets_attention(num_global: int) -> None:
    case = make_case(RowLayout(8, 2, num_global))
    bias = bias_of(case, case.layout, 0)
    row = case.q[:, :, :1]
    probabilities = target_probabilities(row, case.k, bias, case.weights, LocalRow())
    out = LocalAttend().target(row, case.k, case.v, bias, case.weights, None)
    torch.testing.assert_close(
        torch.einsum("hbr,hbre->hbe", probabilities, case.v), out[:, :, 0], rtol=0, atol=TOLERANCE
    )
    torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]), rtol=0, atol=TOLERANCE)
    assert not probabilities[:, case.padded].any()


class OtherRanks:
    """Row 0 of rank 0 and the totals of all ranks, as the group would give them."""

    def __init__(self, query: Tensor, parts: list[Tensor]) -> None:
        self._query, self._parts = query, parts

    def query(self, _q: Tensor) -> Tensor:
        return self._query

    def total(self, lse: Tensor) -> Tensor:
        assert any(torch.equal(lse, part) for part in self._parts)
        return torch.stack(self._parts).logsumexp(0)


class Recorder(OtherRanks):
    """Keeps this rank's part instead."""

    def total(self, lse: Tensor) -> Tensor:
        self._parts.append(lse)
        return lse


@pytest.mark.parametrize("cp", [2, 3, 5])
def test_ranks_have_the_columns_of_the_whole(cp: int) -> None:
    case = make_case(RowLayout(*SEQUENCE))
    layout = RowLayout(*SEQUENCE, cp)
    query, parts = case.q[:, :, :1], []
    biases = [bias_of(case, layout, rank) for rank in range(cp)]
    keys = [share(case.k, layout, rank) for rank in range(cp)]
    for key, bias in zip(keys, biases, strict=True):
        target_probabilities(key[:, :, :1], key, bias, case.weights, Recorder(query, parts))
    got = [
        target_probabilities(key[:, :, :1], key, bias, case.weights, OtherRanks(query, parts))
        for key, bias in zip(keys, biases, strict=True)
    ]
    whole = target_probabilities(query, case.k, bias_of(case, case.layout, 0), case.weights, LocalRow())
    joined = torch.cat(got, dim=-1)
    torch.testing.assert_close(joined[..., : whole.shape[-1]], whole, rtol=0, atol=TOLERANCE)
    assert not joined[..., whole.shape[-1] :].any()


def test_scores_are_the_mean_over_heads_of_probability_times_length() -> None:
    probabilities = torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]])
    v = torch.tensor([[[[3.0, 4.0], [0.0, 2.0]]], [[[0.0, 1.0], [6.0, 8.0]]]])
    # (0.25 x 5 + 0.5 x 1) / 2 and (0.75 x 2 + 0.5 x 10) / 2
    torch.testing.assert_close(node_scores(probabilities, v), torch.tensor([[0.875, 3.25]]))
