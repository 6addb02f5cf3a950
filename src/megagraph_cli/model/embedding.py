"""The input layer: node features through a linear map, a learned table, or their sum; and the global tokens.

Legend: B sequences, R rows of this rank, n distinct feature rows of a micro-batch, F input features, D hidden,
G global tokens, U = nodes + clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.model.drop import Drop
from megagraph_cli.model.dropout import drop_add


@dataclass(frozen=True)
class NodeInput:
    """Input of one micro-batch on one rank of the first stage.

    ``rows`` int64 [n]: distinct feature rows (nodes, then nodes + cluster); ``place`` int64 [B, R]: for each row of
    the rank its position among [the n rows | G global tokens | one zero row]. Features come dense (``dense``
    [n, F]) or in CSR (``columns`` int64 [nnz], ``offsets`` int64 [n + 1], ``values`` [nnz]), or not at all.
    """

    rows: Tensor
    place: Tensor
    dense: Tensor | None = None
    columns: Tensor | None = None
    offsets: Tensor | None = None
    values: Tensor | None = None


class Embedding(nn.Module):
    """NodeInput -> x [B, R, D]; parameters F D + D (features), U D (table), G D (tokens)."""

    def __init__(self, *, hidden_dim: int, num_features: int, table_rows: int, num_global: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, hidden_dim)) if num_features else None
        self.bias = nn.Parameter(torch.empty(hidden_dim)) if num_features else None
        self.table = nn.Parameter(torch.empty(table_rows, hidden_dim)) if table_rows else None
        self.tokens = nn.Parameter(torch.empty(num_global, hidden_dim)) if num_global else None
        self.hidden_dim = hidden_dim

    def forward(self, nodes: NodeInput, drop: Drop | None = None) -> Tensor:
        parts = [self._rows(nodes)]
        if self.tokens is not None:
            parts.append(self.tokens)
        parts.append(parts[0].new_zeros((1, self.hidden_dim)))
        x_BRD = functional.embedding(nodes.place, torch.cat(parts))
        return drop_add(x_BRD, None, drop)

    def _rows(self, nodes: NodeInput) -> Tensor:
        """Embeddings [n, D] of the distinct rows: each is computed once, however many sequences it is in."""
        total: Tensor | None = None
        if self.weight is not None and self.bias is not None:
            total = self._features(nodes, self.weight) + self.bias
        if self.table is not None:
            # A sparse gradient holds the rows that were looked up; a dense one would be a second table.
            rows = functional.embedding(nodes.rows, self.table, sparse=True)
            total = rows if total is None else total + rows
        assert total is not None
        return total

    @staticmethod
    def _features(nodes: NodeInput, weight_FD: Tensor) -> Tensor:
        if nodes.dense is not None:
            return nodes.dense.to(weight_FD.dtype) @ weight_FD
        assert nodes.columns is not None
        assert nodes.offsets is not None
        assert nodes.values is not None
        return functional.embedding_bag(
            nodes.columns,
            weight_FD,
            nodes.offsets,
            mode="sum",
            per_sample_weights=nodes.values.to(weight_FD.dtype),
            include_last_offset=True,
        )
