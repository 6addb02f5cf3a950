"""Preparations that meet others, or are interrupted or killed: one store, and nothing left behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagraph_cli.errors import EXIT_INTERRUPTED
from megagraph_cli.graph import store
from megagraph_cli.graph.prepare import load_graph

_LOAD = """
import sys
import time
from pathlib import Path
from megagraph_cli.graph.prepare import load_graph
folder = Path(sys.argv[2])
graph = load_graph(sys.argv[1], folder, folder / "cache", progress=lambda text: print(text, flush=True))
print("digest", graph.digest)
"""
_HEEDS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from megagraph_cli.cli import main
main()
"""


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _LOAD, name, str(folder)], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_share_one_preparation(tmp_path: Path) -> None:
    workers = [start("demo", tmp_path) for _ in range(3)]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len({output.split("digest ")[1] for output in outputs}) == 1
    assert sum("generating" in output for output in outputs) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_killed_preparation_is_swept_by_the_next_one(tmp_path: Path) -> None:
    worker = start("synthetic:nodes=200000,edges=1000000", tmp_path)
    assert worker.stdout is not None
    assert "generating" in worker.stdout.readline()
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=30)
    assert [item.suffix for item in sorted((tmp_path / "cache").iterdir())] == [".lock", ".tmp"]
    graph = load_graph("demo", tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [graph.path]


def test_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_message: str) -> None:
        if any(tmp_path.rglob("*.tmp")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_graph("demo", tmp_path, tmp_path / "cache", progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_live_preparation_of_another_graph_is_not_swept(tmp_path: Path) -> None:
    other = tmp_path / "other-0123456789abcdef"
    with store.exclusive(other, never):
        aside = tmp_path / f".{other.name}.tmp"
        aside.mkdir()
        load_graph("demo", tmp_path, tmp_path)
        assert aside.is_dir()
    assert not (tmp_path / f".{other.name}.lock").exists()


def never() -> None:
    raise AssertionError("nobody else holds this lock")


def test_what_is_not_the_caches_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / ".drafts-of-mine.tmp").mkdir()
    (tmp_path / ".editor-4711.lock").touch()
    load_graph("demo", tmp_path, tmp_path)
    assert {".drafts-of-mine.tmp", ".editor-4711.lock"} < {item.name for item in tmp_path.iterdir()}


def test_whoever_waits_for_another_preparation_says_so(tmp_path: Path) -> None:
    graph = load_graph("demo", tmp_path, tmp_path / "cache")
    shutil.rmtree(graph.path)
    with store.exclusive(graph.path, never):
        other = start("demo", tmp_path)
        assert other.stdout is not None
        assert "waiting for another process" in other.stdout.readline()
    said, _ = other.communicate(timeout=120)
    assert other.returncode == 0
    assert said.endswith(f"digest {graph.digest}\n")


def test_ctrl_c_during_preparation_leaves_nothing_and_exits_130(tmp_path: Path) -> None:
    name, cache = "synthetic:nodes=400000,edges=4000000", tmp_path / "cache"
    call = [sys.executable, "-c", _HEEDS_CTRL_C, "data", name, "--cache", str(cache), "--json"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.tmp")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert list(cache.iterdir()) == []
