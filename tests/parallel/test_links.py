"""Messages between stages on streams as NCCL has them: no schedule makes stages wait for each other in a circle.

What each stage issues is recorded from the pipeline itself; the streams are simulated. NCCL does the operations of a
group one after another, each after what the host had issued on the device when it was posted, and a message moves when
both of its ends have come to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.layout.schedules import SCHEDULES
from megagraph_cli.parallel.pipeline import Boundary, Neighbours, Staged

Message = tuple[str, int, int, int]
"""Group, from stage, to stage, and which of that group's messages between the two."""

CASES = [
    (schedule, pp, count)
    for schedule in SCHEDULES
    for pp in (2, 3, 4, 5)
    for count in (1, pp, pp + 1, 2 * pp + 1)
    if count >= SCHEDULES[schedule].min_microbatches(pp)
]


@dataclass(frozen=True)
class Operation:
    """One operation on one of a stage's streams: it begins when ``after`` operations of its compute stream are done.

    ``message`` is what a send or receive moves; ``awaits`` the message that a compute operation waits for.
    """

    after: int = 0
    message: Message | None = None
    awaits: Message | None = None


@dataclass
class Recorder:
    """What one stage issues, by stream: "compute" and one for each group."""

    stage: int
    streams: dict[str, list[Operation]] = field(default_factory=lambda: {"compute": []})
    counts: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def compute(self, *_: Any) -> None:
        self.streams["compute"].append(Operation())

    def patched(self) -> Any:
        return mock.patch.multiple(
            dist,
            isend=lambda _, *, group, group_dst: self._posted(group, self.stage, group_dst),
            irecv=lambda _, *, group, group_src: self._posted(group, group_src, self.stage),
            send=lambda _, *, group, group_dst: self._posted(group, self.stage, group_dst).wait(),
            recv=lambda _, *, group, group_src: self._posted(group, group_src, self.stage).wait(),
        )

    def _posted(self, group: str, source: int, destination: int) -> Any:
        key = group, source, destination
        message = (*key, self.counts[key])
        self.counts[key] += 1
        done = len(self.streams["compute"])
        self.streams.setdefault(group, []).append(Operation(after=done, message=message))
        return SimpleNamespace(wait=lambda: self.streams["compute"].append(Operation(awaits=message)))


class Layer(nn.Module):
    """Anything that has a backward; tells when it computes."""

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def forward(self, x: Tensor, _index: Tensor) -> Tensor:
        self.note()
        out = x.to(self.weight.dtype) * self.weight
        if out.requires_grad:
            out.register_hook(self.note)
        return out


def recorded(schedule: str, pp: int, count: int, groups: int) -> list[Recorder]:
    """What every stage issues in making its links, a training step and an inference."""
    down, up = ([f"{way}{number}" for number in range(groups)] for way in ("down", "up"))
    stages = []
    for stage in range(pp):
        recorder = Recorder(stage)
        with recorder.patched():
            pipeline = Staged(
                Layer(recorder.compute),
                neighbours=Neighbours(stage, pp, down, up),  # type: ignore[arg-type]
                schedule=schedule,
                num_microbatches=count,
                loss=lambda out, _: out.sum(),
                boundary=Boundary((1,), torch.float32, torch.device("cpu")),
            )
            pipeline.step(lambda: None)
            pipeline.infer()
        stages.append(recorder)
    return stages


def left_undone(stages: list[Recorder]) -> int:
    """How many operations never come to their turn."""
    at = {(stage.stage, stream): 0 for stage in stages for stream in stage.streams}
    moved: set[Message] = set()

    def head(place: tuple[int, str]) -> Operation | None:
        operations = stages[place[0]].streams[place[1]]
        return operations[at[place]] if at[place] < len(operations) else None

    def ready(message: Message) -> bool:
        ends = [(stage, message[0]) for stage in message[1:3]]
        heads = [head(end) for end in ends]
        return all(
            first is not None and first.message == message and at[stage, "compute"] >= first.after
            for first, (stage, _) in zip(heads, ends, strict=True)
        )

    progress = True
    while progress:
        progress = False
        for place in at:
            while (first := head(place)) is not None:
                if first.message is not None:
                    if not ready(first.message):
                        break
                    moved.add(first.message)
                    for stage in first.message[1:3]:
                        at[stage, first.message[0]] += 1
                elif first.awaits is None or first.awaits in moved:
                    at[place] += 1
                else:
                    break
                progress = True
    return sum(len(stages[stage].streams[stream]) - done for (stage, stream), done in at.items())


@pytest.mark.parametrize(("schedule", "pp", "count"), CASES)
def test_no_stage_waits_for_ever(schedule: str, pp: int, count: int) -> None:
    stages = recorded(schedule, pp, count, min(pp - 1, 2))
    sent = sum(stage.counts[key] for stage in stages for key in stage.counts if key[1] == stage.stage)
    assert sent == (pp - 1) * (2 + 3 * count)
    assert left_undone(stages) == 0
    for stage in stages:
        # Then nothing that it sends waits behind what it has yet to receive.
        for group in stage.streams.keys() - {"compute"}:
            directions = {key[1] == stage.stage for key in stage.counts if key[0] == group}
            assert len(directions) == 1, (stage.stage, group)


def test_with_one_group_each_way_four_stages_would_wait_in_a_circle() -> None:
    assert left_undone(recorded("1f1b", 4, 8, 1)) > 0
    assert left_undone(recorded("1f1b", 2, 8, 1)) == 0
