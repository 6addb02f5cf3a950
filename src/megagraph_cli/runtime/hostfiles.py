"""Files that host 0 keeps, for the ranks of all hosts: they travel over gloo between the hosts' first ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.parallel.mesh import COLLECTIVE_DEADLINE

_PIECE_BYTES = 1 << 25
T = TypeVar("T")
Carry = Callable[[Tensor], object]
"""Sends a tensor, or fills it with what was sent."""


@dataclass(frozen=True)
class HostFiles:
    """``leaders`` has the first rank of each host, of which each has ``per_host``; with one host nothing travels."""

    leaders: dist.ProcessGroup | None = None
    per_host: int = 0

    @classmethod
    def of(cls, hosts: int) -> HostFiles:
        """Every rank of the world calls it."""
        if hosts == 1:
            return cls()
        size = dist.get_world_size()
        ranks = list(range(0, size, size // hosts))
        return cls(dist.new_group(ranks, timeout=COLLECTIVE_DEADLINE, backend="gloo"), size // hosts)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return dist.get_rank() % (self.per_host or dist.get_world_size()) == 0

    def agreed(self, value: T) -> T:
        """Rank 0's value, on every rank; every rank calls it."""
        if self.leaders is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def collect(self, folder: Path) -> None:
        """The files of every other host's ``folder`` into host 0's; every rank calls it, and the others' folders go."""
        if self.leaders is None or not self.leads:
            return
        rank, group = dist.get_rank(), self.leaders
        for other in range(self.per_host, dist.get_world_size(), self.per_host):
            if rank == 0:
                _receive(folder, lambda tensor, other=other: dist.recv(tensor, src=other, group=group))  # type: ignore[misc]
            elif rank == other:
                _send(folder, lambda tensor: dist.send(tensor, dst=0, group=group))
                shutil.rmtree(folder)

    @contextmanager
    def here(self, folder: Path) -> Iterator[Path]:
        """Host 0's ``folder`` on every host while the block runs; every rank calls it. Elsewhere it is a copy."""
        if self.leaders is None:
            yield folder
            return
        rank, group = dist.get_rank(), self.leaders
        copy = folder.with_name(f".{folder.name}.copy")
        if rank == 0:
            _send(folder, lambda tensor: dist.broadcast(tensor, src=0, group=group))
        elif self.leads:
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            _receive(copy, lambda tensor: dist.broadcast(tensor, src=0, group=group))
        dist.barrier()
        yield folder if rank < self.per_host else copy
        dist.barrier()
        if self.leads and rank:
            shutil.rmtree(copy)


def _send(folder: Path, carry: Carry) -> None:
    """The names and sizes of a folder's files, then their bytes."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    listed = json.dumps([[path.name, path.stat().st_size] for path in paths]).encode()
    carry(torch.tensor([len(listed)]))
    carry(torch.frombuffer(bytearray(listed), dtype=torch.uint8))
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                carry(torch.frombuffer(bytearray(piece), dtype=torch.uint8))


def _receive(folder: Path, carry: Carry) -> None:
    """What ``_send`` sent, into ``folder``."""
    length = torch.zeros(1, dtype=torch.int64)
    carry(length)
    listed = torch.empty(int(length), dtype=torch.uint8)
    carry(listed)
    for name, size in json.loads(listed.numpy().tobytes()):
        with (folder / Path(name).name).open("wb") as file:
            for start in range(0, size, _PIECE_BYTES):
                piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8)
                carry(piece)
                file.write(piece.numpy().tobytes())
