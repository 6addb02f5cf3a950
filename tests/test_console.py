"""What is printed on stdout and stderr, whoever reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megagraph_cli import console
from megagraph_cli.console import print_json

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


@pytest.mark.parametrize(("name", "stream"), [("print_line", "stdout"), ("print_error", "stderr")])
def test_a_stream_that_was_never_open_changes_nothing(name: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)
    getattr(console, name)("line")
