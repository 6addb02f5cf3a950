"""How many hosts a call has, which one this is, and where they meet; which network interface leads there."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from megagraph_cli.errors import MgraphError

JOIN_S = 180.0
"""Seconds that hosts wait for each other at the start."""
MOST_HOSTS = 1024


@dataclass(frozen=True)
class Hosts:
    """``count`` hosts of which this is number ``rank``; they meet at ``address``, which is host 0's, on ``port``."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    join_s: float = JOIN_S

    @classmethod
    def of(cls, nnodes: int, node_rank: int | None, endpoint: str | None) -> Hosts:
        """From ``--nnodes``, ``--node-rank`` and ``--rdzv-endpoint``. Raises MgraphError (exit 2)."""
        if nnodes == 1:
            if node_rank:
                raise MgraphError(f"--node-rank {node_rank} of one host; say how many there are with --nnodes")
            return cls()
        if not 1 <= nnodes <= MOST_HOSTS:
            raise MgraphError(f"--nnodes {nnodes} is out of range; give 1 to {MOST_HOSTS}")
        if node_rank is None or endpoint is None:
            missing = "--node-rank I (0 on the first host)" if node_rank is None else "--rdzv-endpoint HOST:PORT"
            raise MgraphError(f"--nnodes {nnodes} needs {missing}; run the same command on each host with its own rank")
        if not 0 <= node_rank < nnodes:
            raise MgraphError(f"--node-rank {node_rank} is none of {nnodes} hosts; give 0 to {nnodes - 1}")
        return cls(nnodes, node_rank, *_split(endpoint))

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def first(self) -> bool:
        """Host 0, which writes the artifacts."""
        return self.rank == 0

    def at_first(self, path: Path) -> Path:
        """How a file of host 0 is called on this host."""
        return path if self.first else Path(f"host 0:{path}")

    def share(self, workers: int) -> int:
        """Workers of each host. Raises MgraphError (exit 2) where they are not equally many."""
        if workers % self.count:
            raise MgraphError(
                f"{workers} workers cannot be shared equally by {self.count} hosts; ask for a multiple of {self.count}"
            )
        return workers // self.count


def _split(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.rpartition(":")
    if not address or ":" in address or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise MgraphError(
            f"--rdzv-endpoint {endpoint!r} is no HOST:PORT; give host 0's name or IPv4 address and a free port on it"
        )
    return address, int(port)


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an address; None where none is known to."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return str(name)
    return None


def check_own(hosts: Hosts) -> None:
    """That host 0's address is this host's. Raises MgraphError (exit 2)."""
    try:
        numbers = {entry[4][0] for entry in socket.getaddrinfo(hosts.address, None, socket.AF_INET)}
    except OSError as error:
        raise MgraphError(
            f"--rdzv-endpoint {hosts.endpoint}: this host does not know the name {hosts.address}; give its address"
        ) from error
    for number in numbers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((str(number), 0))
                return
            except OSError:
                continue  # it is another host's
    raise MgraphError(
        f"--rdzv-endpoint {hosts.endpoint} is not an address of this host, though its --node-rank is 0; "
        "give host 0's own address on every host"
    )
