"""What must hold before a recipe is trained on a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megagraph_cli.artifacts.workload import DatasetSection, ModelSection, Recipe, TrainSection
from megagraph_cli.commands.workloads import require_trainable
from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph.graph import Split
from tests.graph.tiny import random_graph

NONE = np.zeros(0, dtype=np.int64)
WHOLE = Split(np.arange(10), np.arange(10, 15), np.arange(15, 20))
RECIPE = Recipe(dataset=DatasetSection(name="tiny"))


@pytest.mark.parametrize(
    ("changes", "split", "way_out"),
    [
        ({"train": TrainSection(sampling_update_epochs=2)}, replace(WHOLE, val=NONE), "train.sampling_update_epochs=0"),
        ({"model": ModelSection(embedding="features")}, WHOLE, "model.embedding=table"),
        ({"dataset": DatasetSection(name="tiny", metric="roc_auc")}, WHOLE, "dataset.metric=accuracy"),
        ({}, replace(WHOLE, train=NONE), "--set dataset.split"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_way_out(
    changes: dict[str, object], split: Split, way_out: str
) -> None:
    graph = random_graph("none")
    require_trainable(RECIPE, graph, WHOLE)
    with pytest.raises(MgraphError, match=way_out) as caught:
        require_trainable(RECIPE.model_copy(update=changes), graph, split)
    assert caught.value.exit_code == EXIT_USAGE
