"""The recipe's types, ranges and the numbers that follow from it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megagraph_cli.artifacts.workload import (
    BatchSection,
    DatasetSection,
    ModelSection,
    TrainSection,
    embedding_inputs,
)
from tests.artifacts import examples


@pytest.mark.parametrize("split", ["auto", "public:0", "public:9", "random:0.6,0.2,0.2", "random:0.5,0.1,0.1"])
def test_splits_that_are_known(split: str) -> None:
    assert DatasetSection(name="x", split=split).split == split


@pytest.mark.parametrize(
    "split",
    [
        "",
        "auto:1",
        "public",
        "public:",
        "public:x",
        "random:1",
        "random:0.6,0.3,0.3",
        "random:a,b,c",
        "random:0,0.5,0.5",
    ],
)
def test_splits_that_are_none(split: str) -> None:
    with pytest.raises(ValidationError, match="is no split"):
        DatasetSection(name="x", split=split)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (ModelSection, {"num_layers": 0}),
        (ModelSection, {"num_heads": 3, "hidden_dim": 64}),
        (ModelSection, {"dropout": 1.0}),
        (ModelSection, {"num_layers": "4"}),
        (ModelSection, {"num_layers": 4.0}),
        (ModelSection, {"bias_powers": 0}),
        (BatchSection, {"batch_size": 0}),
        (BatchSection, {"batch_size": 2**31}),
        (BatchSection, {"num_sampled": 0}),
        (DatasetSection, {"name": "x", "split_seed": 2**63}),
        (TrainSection, {"rng_seed": 2**63}),
        (TrainSection, {"lr": 0.0}),
        (TrainSection, {"lr": float("nan")}),
        (TrainSection, {"dtype": "float16"}),
        (TrainSection, {"sampling_update_epochs": -1}),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused(section: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section(**values)


@pytest.mark.parametrize(
    ("embedding", "features", "expected"),
    [
        ("auto", 5, (True, False)),
        ("auto", 0, (False, True)),
        ("both", 5, (True, True)),
        ("table", 5, (False, True)),
        ("features", 5, (True, False)),
    ],
)
def test_the_embedding_setting_chooses_inputs(embedding: str, features: int, expected: tuple[bool, bool]) -> None:
    assert embedding_inputs(embedding, features) == expected


def test_parameters_follow_from_the_graph() -> None:
    # F d + d for features, d for the one global token; the table has rows for nodes and clusters.
    assert examples.workload().parameters().input == 16 * 64 + 64 + 64
    graph = examples.GRAPH.model_copy(update={"features": 0})
    assert examples.workload(graph).parameters().input == (100 + 10) * 64 + 64
