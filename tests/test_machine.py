"""Usable cores respect the cgroup quota of both versions, wherever in the tree it is set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megagraph_cli import machine


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def host(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A fake root with a /proc/self/cgroup and some files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/not/here\n", {"cpu.max": "400000 100000\n"}, 4),  # in a container the mount is the group itself
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
        (
            "5:memory:/m\n4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "600000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            6,
        ),
        ("4:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_the_smallest_quota_above_counts(groups: str, files: dict[str, str], cores: int, tmp_path: Path) -> None:
    assert machine.usable_cores(host(tmp_path, groups, files)) == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert machine.usable_cores(tmp_path) == 8


def test_workers_share_the_cores_and_each_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    assert [machine.threads_per_worker(workers) for workers in (1, 2, 3, 8, 64)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("workers", "measured", "threads"), [(1, None, 8), (1, 2, 2), (2, 4, 4), (4, 4, 2), (64, 4, 1)]
)
def test_threads_are_those_measured_where_the_cores_allow(
    workers: int, measured: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    assert machine.threads_as_measured(workers, measured) == threads


def test_without_a_driver_there_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver_devices", lambda: 0)
    assert machine.cuda_devices() == 0
