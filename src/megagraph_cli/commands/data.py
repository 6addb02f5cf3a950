"""What ``mgraph data`` says about a prepared graph."""

from __future__ import annotations

from megagraph_cli.graph.graph import Graph, Split


def describe(graph: Graph, split: Split) -> dict[str, object]:
    """The fields of ``mgraph data --json``: sizes, what the raw files held, the split, licence and source."""
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "isolated": graph.counts["isolated"],
        "self_loops": graph.counts["self_loops"],
        "duplicates": graph.counts["duplicates"],
        "one_way": graph.counts["one_way"],
        "unlabelled": graph.counts["unlabelled"],
        "train": int(split.train.size),
        "val": int(split.val.size),
        "test": int(split.test.size),
        "clusters": graph.num_clusters,
        "licence": graph.licence,
        "source": graph.source,
    }
