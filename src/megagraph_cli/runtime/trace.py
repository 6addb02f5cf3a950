"""The measured timeline of a few steps (``mgraph train --trace``), in the lanes of the simulated one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.trace import Lane, Span, write_trace
from megagraph_cli.layout.dims import Place

TRACED_STEPS = 3


class Tracer:
    """Spans of one rank over ``TRACED_STEPS`` steps. Outside of these it costs nothing but a look at a flag.

    On cuda a span waits at both ends for what this rank has queued: a traced step is slower, and its times are the
    device's. It waits for the stream of the work alone. A receive that was posted ahead is a kernel of another stream
    that ends when a neighbour sends, and the neighbour may be waiting for what this rank does after the span.
    """

    def __init__(self, path: Path | None, rank: int, place: Place, device: torch.device) -> None:
        self.path, self.rank, self.place, self.device = path, rank, place, device
        self.spans: list[Span] = []
        self._left = TRACED_STEPS if path is not None else 0
        self._since_s: float | None = None

    def begin_step(self) -> None:
        """A step that may be traced begins; every rank calls it, so that all clocks start together."""
        if self._left and self._since_s is None:
            dist.barrier()
            self._since_s = time.perf_counter()

    def end_step(self) -> None:
        if self._since_s is not None and self._left:
            self._left -= 1

    @contextmanager
    def span(self, lane: Lane, name: str) -> Iterator[None]:
        """What happens inside is one span, if the step is traced."""
        if self._since_s is None or not self._left:
            yield
            return
        if lane != "host":
            self._settle()
        start_s = time.perf_counter()
        yield
        if lane != "host":
            self._settle()
        since_s = self._since_s
        self.spans.append(Span(self.rank, lane, name, start_s - since_s, time.perf_counter() - since_s))

    def _settle(self) -> None:
        """Wait until the device has done this span's work; its stream itself waits for the messages that it takes."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def write(self) -> None:
        """All ranks' spans into one file; every rank calls it, rank 0 writes."""
        if self.path is None:
            return
        gathered: list[tuple[str, list[Span]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (f"rank {self.rank}: {self.place}", self.spans))
        if self.rank == 0:
            known = [each for each in gathered if each is not None]
            spans = [span for _, mine in known for span in mine]
            write_trace(self.path, spans, {rank: name for rank, (name, _) in enumerate(known)})
