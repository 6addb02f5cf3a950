"""What is printed on stdout and stderr, whoever reads it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megagraph_cli import console
from megagraph_cli.console import Screen, print_json

_TWICE = "from megagraph_cli.console import {0}; {0}('line'); {0}('line')"


def test_json_is_ascii_even_for_a_path_that_is_no_utf8(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    values = {"out": "/tmp/gr\u00e4ph \udcff.npz"}
    print_json(values)
    written = capfdbinary.readouterr().out
    assert written.isascii()
    assert json.loads(written) == values


@pytest.mark.parametrize(("name", "stream"), [("print_line", "stdout"), ("print_error", "stderr")])
def test_a_reader_that_is_gone_changes_nothing(name: str, stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: write}
        done = subprocess.run([sys.executable, "-c", _TWICE.format(name)], **streams, timeout=60, check=False)
    finally:
        os.close(write)
    assert done.returncode == 0
    assert not done.stdout
    assert not done.stderr


def test_a_table_for_a_reader_that_is_gone_changes_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    program = """
from megagraph_cli.console import Screen
for _ in range(2):
    Screen.stderr().table("title", ["a", "b"], [["1", "2"]])
print("done")
"""
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=write, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (0, b"done\n")


@pytest.mark.parametrize(("name", "stream"), [("print_line", "stdout"), ("print_error", "stderr")])
def test_a_stream_that_was_never_open_changes_nothing(
    name: str, stream: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, stream, None)
    getattr(console, name)("line")
    assert capfd.readouterr() == ("", "")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full, which stands in for a full disk")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 1, "standard output cannot be written"),
        (["search", "--help"], 1, "standard output cannot be written"),
        (["--version"], 1, "standard output cannot be written"),
        (["nonsense", "--json"], 2, "no such command"),
    ],
)
def test_a_full_disk_is_one_sentence(arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "megagraph_cli.cli", *arguments]
    with FULL.open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        silent = subprocess.run(command, stdout=full, stderr=full, timeout=60, check=False)
    assert (done.returncode, silent.returncode) == (code, code)
    assert done.stderr.startswith(f"mgraph: {said}")
    assert done.stderr.count("\n") == 1


class Watched:
    """A terminal's screen with a clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.file = io.StringIO()
        self.screen = Screen(
            Console(file=self.file, force_terminal=True, width=120, get_time=lambda: self.now_s, color_system=None)
        )

    def shown(self, bar: Any) -> str:
        """The line of the bar as it stands now."""
        self.file.seek(0)
        self.file.truncate()
        bar.progress.refresh()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.file.getvalue()).strip()


def test_a_bar_tells_the_time_left_by_how_fast_it_went() -> None:
    """4 of 10 steps since it was resumed at 2 took 40 s: the 4 that are left take 40 s more, and less as time goes."""
    watched = Watched()
    with watched.screen.bar("starting", 10) as bar:
        assert "left" not in watched.shown(bar)
        watched.now_s += 30
        bar.at(2, "step 2")
        assert "left" not in watched.shown(bar)
        watched.now_s += 40
        bar.at(6, "step 6")
        line = watched.shown(bar)
        assert "step 6" in line
        assert "60%" in line
        assert "0:01:10 0:00:40 left" in line
        watched.now_s += 15
        assert "0:01:25 0:00:25 left" in watched.shown(bar)
        watched.now_s += 60
        assert "0:00:00 left" in watched.shown(bar)


def test_a_bar_tells_the_time_left_that_the_work_knows() -> None:
    watched = Watched()
    with watched.screen.bar("starting") as bar:
        watched.now_s += 5
        bar.at(5, "modules", 65, 60)
        line = watched.shown(bar)
        assert "8%" in line
        assert "0:01:00 left" in line
