"""Two hosts on one machine: network namespaces joined by a pair of virtual cables whose rate can be limited.

Needs root, `ip` and `tc` (iproute2). Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .running import killed_at_end

DEVICE = "cable"
PORT = 29511
BURST = "64kb"
"""Sent at once after a pause, whatever the rate: at least one segment as large as the kernel makes them."""


def missing() -> str | None:
    """Why this machine cannot make a slow link; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "taskset"):
        if shutil.which(tool) is None:
            return f"there is no {tool} on the path"
    probe = f"mgraph-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@dataclass(frozen=True)
class Host:
    """One of two hosts: its namespace, its address, and its rank."""

    namespace: str
    address: str
    rank: int


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a free link between them, gone when the block ends."""
    names = [f"mgraph-{os.getpid()}-{side}" for side in "ab"]
    hosts = tuple(Host(name, f"10.77.0.{rank + 1}", rank) for rank, name in enumerate(names))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts[0], hosts[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def limit(bytes_per_s: float | None) -> None:
    """Called by a process inside a namespace: how fast it can send; None takes the limit away."""
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], capture_output=True, check=False)
    if bytes_per_s is not None:
        rate = f"{round(8 * bytes_per_s)}bit"
        shape = ["tbf", "rate", rate, "burst", BURST, "latency", "2s"]
        subprocess.run(["tc", "qdisc", "add", "dev", DEVICE, "root", *shape], check=True)


def pinned(rank: int) -> list[str]:
    """A prefix of a command that gives each rank a core of its own, where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[rank % len(cores)])]


@contextmanager
def mgraph_on(
    hosts: Sequence[Host], arguments: Sequence[str], folders: Sequence[Path], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same `mgraph ARGUMENTS` on each host, as its `--node-rank`, in a folder of its own, while the block runs."""
    command = [sys.executable, "-m", "megagraph_cli.cli", *arguments]
    several = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
    processes: list[subprocess.Popen[str]] = []
    with killed_at_end(processes):
        for host, folder in zip(hosts, folders, strict=True):
            processes.append(
                subprocess.Popen(
                    [*inside(host), *command, *several, "--node-rank", str(host.rank)],
                    cwd=folder,
                    env=os.environ | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes


def inside(host: Host) -> list[str]:
    """A prefix of a command that runs it on a host."""
    return ["ip", "netns", "exec", host.namespace]


def limit_link(hosts: Sequence[Host], bytes_per_s: float | None) -> None:
    """How fast each host can send to the other; None takes the limit away."""
    for host in hosts:
        subprocess.run([*inside(host), sys.executable, "-c", LIMIT, repr(bytes_per_s)], check=True)


LIMIT = "import sys; from bench.parts.slow_link import limit; limit(eval(sys.argv[1]))"


def run_on_both(arguments: Sequence[str], deadline_s: float) -> list[str]:
    """`python ARGUMENTS` on both hosts as two ranks that find each other; what each wrote to stdout.

    Each gets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and a core of its own where there are two.
    """
    processes: list[subprocess.Popen[str]] = []
    with two_hosts() as hosts, killed_at_end(processes):
        for host in hosts:
            processes.append(
                subprocess.Popen(
                    [*pinned(host.rank), *inside(host), sys.executable, *arguments],
                    env=os.environ
                    | {
                        "RANK": str(host.rank),
                        "WORLD_SIZE": "2",
                        "MASTER_ADDR": hosts[0].address,
                        "MASTER_PORT": str(PORT),
                        "GLOO_SOCKET_IFNAME": DEVICE,
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=deadline_s)[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        raise RuntimeError(f"the two ranks ended with {codes}")
    return outputs
