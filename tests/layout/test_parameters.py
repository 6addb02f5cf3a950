"""Parameter counts against the formula and the figure of the design."""

from __future__ import annotations

import pytest

from megagraph_cli.layout.parameters import ParameterCounts, count_parameters


def counts(**changes: int) -> ParameterCounts:
    sizes = {
        "hidden_dim": 128,
        "ffn_dim": 128,
        "num_heads": 8,
        "bias_powers": 6,
        "num_global": 1,
        "num_classes": 7,
        "num_features": 1433,
        "table_rows": 0,
    }
    return count_parameters(**(sizes | changes))


def test_the_stated_model_has_583405_parameters() -> None:
    assert counts().of_model(4) == 583_405


@pytest.mark.parametrize("table_rows", [0, 50])
@pytest.mark.parametrize("num_features", [0, 33])
def test_stages_add_up_to_the_model_and_hold_a_copy_of_what_is_shared(num_features: int, table_rows: int) -> None:
    one = counts(num_features=num_features, table_rows=table_rows)
    layers = [1, 3, 2]
    stages = [one.of_stage(n, first=i == 0, last=i == 2) for i, n in enumerate(layers)]
    assert sum(stages) == one.of_model(6) + 2 * one.shared
