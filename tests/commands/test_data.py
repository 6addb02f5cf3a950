"""The JSON fields of `mgraph data`."""

from __future__ import annotations

import json
from pathlib import Path

from megagraph_cli.commands.data import describe
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split


def test_fields_are_exactly_these(tmp_path: Path) -> None:
    graph = load_graph("demo", tmp_path, tmp_path / "cache")
    report = describe(graph, make_split(graph, "auto", 0))
    assert list(report) == [
        "nodes",
        "edges",
        "features",
        "classes",
        "isolated",
        "self_loops",
        "duplicates",
        "one_way",
        "unlabelled",
        "train",
        "val",
        "test",
        "clusters",
        "licence",
        "source",
    ]
    assert json.loads(json.dumps(report)) == report
    assert (report["train"], report["val"], report["test"], report["clusters"]) == (2400, 800, 800, 400)
