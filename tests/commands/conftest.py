"""``mgraph`` in an empty folder, over one prepared graph."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.parts.running import killed_at_end


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One prepared graph for all tests of this process."""
    return os.environ | {"MGRAPH_CACHE": str(tmp_path_factory.mktemp("graphs"))}


@pytest.fixture
def mgraph(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``mgraph`` in an empty folder; what a failed test leaves running is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "megagraph_cli.cli", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    with killed_at_end(processes):
        yield start
