"""Parameter counts of each part of the model (paper.md, "Parameters"): what is built and what is weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters: ``input`` on the first stage, ``layer`` each, ``head`` on the last, ``shared`` on all.

    ``shared`` is the global tokens' bias vector [G, M], one parameter of which every stage holds a copy; ``table`` is
    the part of ``input`` that is a table of node embeddings, whose gradient is the rows that a step touched.
    """

    input: int
    layer: int
    head: int
    shared: int
    table: int = 0

    @overload
    def of_stage(self, num_layers: int, *, first: bool, last: bool) -> int: ...
    @overload
    def of_stage(self, num_layers: NDArray[np.float64], *, first: bool, last: bool) -> NDArray[np.float64]: ...
    def of_stage(self, num_layers: int | NDArray[np.float64], *, first: bool, last: bool) -> int | NDArray[np.float64]:
        """Parameters that a stage with ``num_layers`` layers holds, for one number of layers or an array of them."""
        return self.shared + num_layers * self.layer + first * self.input + last * self.head

    def of_model(self, num_layers: int) -> int:
        """Parameters of the whole model, each counted once."""
        return self.of_stage(num_layers, first=True, last=True)


def count_parameters(
    *,
    hidden_dim: int,
    ffn_dim: int,
    num_heads: int,
    bias_powers: int,
    num_global: int,
    num_classes: int,
    num_features: int,
    table_rows: int,
) -> ParameterCounts:
    """Counts for one model; ``num_features`` is 0 without a feature input, ``table_rows`` 0 without a table."""
    d, f = hidden_dim, ffn_dim
    features = num_features * d + d if num_features else 0
    attention = 4 * (d * d + d) + bias_powers * num_heads + num_heads
    feed_forward = (d * f + f) + (f * d + d)
    return ParameterCounts(
        input=features + table_rows * d + num_global * d,
        layer=attention + 4 * d + feed_forward,
        head=2 * d + d * num_classes + num_classes,
        shared=num_global * bias_powers,
        table=table_rows * d,
    )
