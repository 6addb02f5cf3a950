"""The graph that parity is shown on, and the one worker that all plans are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.runtime.build import Order
from tests.parity.cases import Case
from tests.parity.judge import DATASET, RAW, STEP_TOLERANCE, run
from tests.parity.runner import Outcome

ALONE = Order(ParallelDims(1, 1, 1), AXES, (5,), 1, "gpipe")
"""One worker, one micro-batch."""


@pytest.fixture(scope="session", params=[DATASET])
def dataset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def graph_path(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_graph(dataset, RAW, tmp_path_factory.mktemp("cache")).path


@pytest.fixture(scope="session")
def reference(graph_path: Path, dataset: str) -> dict[str, Outcome]:
    """By dtype."""
    cases = [Case(ALONE, dtype) for dtype in STEP_TOLERANCE]
    return dict(zip(STEP_TOLERANCE, run(1, graph_path, dataset, cases), strict=True))


@pytest.fixture(scope="session")
def table_reference(graph_path: Path, dataset: str) -> Outcome:
    """Features and a table of node embeddings."""
    return run(1, graph_path, dataset, [Case(ALONE, "float64", embedding="both")])[0]


@pytest.fixture(scope="session")
def dropout_reference(graph_path: Path, dataset: str) -> Outcome:
    """Features and a table, dropout 0.3 in input, residuals and attention."""
    return run(1, graph_path, dataset, [Case(ALONE, "float64", embedding="both", dropout=0.3)])[0]
