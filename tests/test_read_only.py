"""Places that cannot be written: one sentence, exit 2, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagraph_cli.errors import EXIT_USAGE
from tests.artifacts import examples
from tests.cost import planted


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be made: mode bits do not bind root, a read-only mount does."""
    folder = tmp_path / "sealed"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    if sys.platform != "linux":
        pytest.skip("as root, a folder can be made read-only by a Linux mount alone")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "mgraph-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this root may not mount, and mode bits do not bind it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (["profile", "--dataset", "demo", "--device", "cpu", "--out", "sealed/profile.json"], "--out"),
        (["fit", "measured.json", "--out", "sealed/cost_model.json"], "--out"),
        (["data", "demo", "--cache", "sealed/graphs"], "--cache"),
        (["data", "demo", "--cache", "sealed"], "--cache"),
        (["train", "--run-dir", "sealed/run", "--cache", "graphs"], "--run-dir"),
    ],
    ids=["profile", "fit", "new cache", "cache", "run directory"],
)
def test_a_read_only_place_is_one_sentence(read_only: Path, tmp_path: Path, arguments: list[str], way_out: str) -> None:
    planted.profile().save(tmp_path / "measured.json")
    (tmp_path / "plan.json").write_text(json.dumps(examples.hand_written_plan()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "megagraph_cli.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (EXIT_USAGE, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert "sealed" in done.stderr
    assert way_out in done.stderr
    assert list(read_only.iterdir()) == []
