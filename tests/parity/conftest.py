"""The graph that parity is shown on, and the one worker that all plans are held against."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from megagraph_cli.graph.prepare import load_graph
from tests.parity.cases import Case
from tests.parity.judge import DATASET, RAW, Alone, run
from tests.parity.runner import Outcome


@pytest.fixture(scope="session", params=[DATASET])
def dataset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def graph_path(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_graph(dataset, RAW, tmp_path_factory.mktemp("cache")).path


@pytest.fixture(scope="session")
def alone(graph_path: Path, dataset: str) -> Alone:
    """What one worker makes of a case's model; each model is trained once."""

    @cache
    def outcome(case: Case) -> Outcome:
        return run(1, graph_path, dataset, [case])[0]

    return lambda case: outcome(case.alone)
