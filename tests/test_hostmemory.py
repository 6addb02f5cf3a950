"""Available memory respects the control groups' limits of both versions, wherever in the tree they are set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megagraph_cli import hostmemory
from tests.test_machine import host

HOST_BYTES = 10_000


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("", {}, HOST_BYTES),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "500\n"}, HOST_BYTES),
        ("0::/a\n", {"a/memory.max": "4000\n", "a/memory.current": "500\n"}, 3500),
        (
            "0::/a\n",
            {"a/memory.max": "4000\n", "a/memory.current": "500\n", "a/memory.stat": "inactive_file 100\n"},
            3600,
        ),
        (
            "0::/a\n",
            {"a/memory.max": "4000\n", "a/memory.current": "50\n", "a/memory.stat": "inactive_file 90\n"},
            4000,
        ),
        ("0::/a\n", {"a/memory.max": "400\n", "a/memory.current": "500\n"}, 0),
        ("0::/a\n", {"a/memory.max": "99999\n", "a/memory.current": "500\n"}, HOST_BYTES),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "4000\n",
                "a/b/memory.current": "500\n",
                "a/memory.max": "5000\n",
                "a/memory.current": "3000\n",
            },
            2000,
        ),
        ("0::/not/here\n", {"memory.max": "4000\n", "memory.current": "0\n"}, 4000),
        (
            "4:cpu:/x\n3:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "4000\n",
                "memory/x/memory.usage_in_bytes": "1000\n",
                "memory/x/memory.stat": "cache 7\ninactive_file 1\ntotal_inactive_file 300\n",
            },
            3300,
        ),
        (
            "3:memory:/x\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1000\n"},
            HOST_BYTES,
        ),
    ],
)
def test_the_tightest_limit_above_counts(
    groups: str, files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST_BYTES))
    assert hostmemory.available_bytes(host(tmp_path, groups, files)) == left


def test_without_control_groups_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST_BYTES))
    assert hostmemory.available_bytes(tmp_path) == HOST_BYTES


def test_this_host_has_memory_left() -> None:
    assert 0 < hostmemory.available_bytes() <= psutil.virtual_memory().total
