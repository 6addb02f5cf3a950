"""The prepared graph of a workload, and what later commands need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megagraph_cli.artifacts.workload import DatasetSection, GraphInfo, Recipe, Workload, embedding_inputs
from megagraph_cli.console import Screen
from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.density import feature_density
from megagraph_cli.graph.graph import Graph, Split
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split

SAME_FILES = "give every host the same raw files, and the same version of mgraph"


@dataclass(frozen=True)
class Folders:
    """Where raw files lie (``root``), where prepared graphs go (``cache``), whether a download is accepted."""

    root: Path
    cache: Path
    accept_download: bool = False


def prepare(dataset: DatasetSection, folders: Folders, screen: Screen) -> tuple[Graph, Split]:
    """The prepared graph and its split. Raises MgraphError (exit 2) on bad data or a split that cannot be."""
    graph = load_graph(
        dataset.name,
        folders.root,
        folders.cache,
        feature_dtype=dataset.feature_dtype,
        accept_download=folders.accept_download,
        progress=screen.step,
    )
    split = make_split(graph, dataset.split, dataset.split_seed)
    if split.shared:
        screen.warn(
            f"{split.shared} nodes of {graph.name} are in more than one of train, validation and test under split "
            f"{dataset.split}: their scores say little of unseen nodes"
        )
    return graph, split


def require_trainable(recipe: Recipe, graph: Graph, split: Split) -> None:
    """That the recipe can be trained on this graph. Raises MgraphError (exit 2)."""
    wants_features, _ = embedding_inputs(recipe.model.embedding, graph.num_features)
    if wants_features and not graph.num_features:
        raise MgraphError(
            f"model.embedding = {recipe.model.embedding!r} needs node features and {graph.name} has none; "
            "set model.embedding=table"
        )
    if recipe.dataset.metric == "roc_auc" and graph.num_classes != 2:
        raise MgraphError(
            f"dataset.metric = 'roc_auc' needs two classes and {graph.name} has {graph.num_classes}; "
            "set dataset.metric=accuracy"
        )
    if recipe.train.sampling_update_epochs and not split.val.size:
        raise MgraphError(
            f"train.sampling_update_epochs = {recipe.train.sampling_update_epochs} learns from validation targets and "
            f"{graph.name} has none under this split; set train.sampling_update_epochs=0"
        )
    if not split.train.size:
        raise MgraphError(
            f"{graph.name} has no labelled node to train on under this split; choose another with --set dataset.split"
        )


def graph_info(graph: Graph, split: Split) -> GraphInfo:
    """What later commands need to know of a graph without opening it."""
    return GraphInfo(
        digest=graph.digest,
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        features=graph.num_features,
        feature_density=feature_density(graph),
        classes=graph.num_classes,
        clusters=graph.num_clusters,
        train=int(split.train.size),
        val=int(split.val.size),
        test=int(split.test.size),
    )


def workload_of(recipe: Recipe, graph: Graph, split: Split) -> Workload:
    """The resolved recipe together with what is known of its prepared graph."""
    return Workload(
        dataset=recipe.dataset,
        model=recipe.model,
        batch=recipe.batch,
        train=recipe.train,
        graph=graph_info(graph, split),
    )
