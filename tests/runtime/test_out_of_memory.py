"""A device that runs out of memory: what is recorded, what is left out, and that all ranks go on alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.artifacts.profile import ComputeSample
from megagraph_cli.errors import EXIT_INFEASIBLE, MgraphError
from megagraph_cli.graph.splits import make_split
from megagraph_cli.runtime import measure_compute
from megagraph_cli.runtime.grid import PLAIN, Sizes
from megagraph_cli.runtime.measure_compute import Room, Subject, measure_modules, try_microbatches
from megagraph_cli.runtime.probes import Context, Probe
from tests.ranks import run_ranks
from tests.runtime.small import BATCH, CPU, small_graph, small_workload

PLENTY = Room(1e15)
SIZES = Sizes((1, 2, 3), (1, 2, 4, 8), runs=1)


def context() -> Context:
    graph = small_graph()
    workload = small_workload(graph, train={"dtype": "float32"})
    split = make_split(graph, workload.dataset.split, workload.dataset.split_seed)
    return Context(workload, graph, CPU, 1, split.train)


def world() -> Any:
    return dist.group.WORLD


@contextmanager
def runs_out(module: str, layers: int, size: int) -> Iterator[list[int]]:
    """A device whose memory is too small for ``size`` sequences in ``layers`` layers; gives the sizes that are run."""
    forward, sizes = Probe.forward, []

    def tried(probe: Probe) -> Tensor:
        assert probe.inputs is not None
        sizes.append(probe.inputs.shape[0])
        if probe.kind == module and probe.num_layers >= layers and probe.inputs.shape[0] >= size:
            raise torch.OutOfMemoryError("planted")
        return forward(probe)

    Probe.forward = tried  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Probe.forward = forward  # type: ignore[method-assign]


def told(samples: list[ComputeSample], module: str = "layer") -> dict[int, dict[int, bool]]:
    """Layers in a row -> micro-batch -> whether memory ran out."""
    found: dict[int, dict[int, bool]] = {}
    for sample in samples:
        if sample.module == module:
            found.setdefault(sample.num_layers, {})[sample.microbatch_size] = sample.out_of_memory
    return found


WHOLE = dict.fromkeys((1, 2, 4, 8), False)


def test_a_size_that_runs_out_is_a_bound_and_larger_ones_are_not_tried(alone: None) -> None:
    with runs_out("layer", 2, 4):
        samples = measure_modules(context(), 1, world(), PLAIN, SIZES, PLENTY)
    assert told(samples) == {1: WHOLE, 2: {1: False, 2: False, 4: True}, 3: {1: False, 2: False}}
    # What comes after goes on as if nothing had been.
    assert told(samples, "last_layer") == {1: WHOLE}
    assert told(samples, "input") == told(samples, "head") == {0: WHOLE}
    (bound,) = [sample for sample in samples if sample.out_of_memory]
    assert (bound.forward_s, bound.backward_s, bound.samples_s) == (0.0, 0.0, [])
    before = next(sample for sample in samples if sample.num_layers == 2)
    assert bound.memory == {"parameters": before.memory["parameters"]}
    assert ComputeSample.model_validate(bound.model_dump(mode="json")) == bound


def test_a_module_that_never_fits_is_one_bound(alone: None) -> None:
    with runs_out("head", 0, 1):
        samples = measure_modules(context(), 1, world(), PLAIN, Sizes((1,), (1, 2), runs=1), PLENTY)
    assert told(samples, "head") == {0: {1: True}}
    assert told(samples) == {1: {1: False, 2: False}}


def samples_of(rank: int, cp: int, failing: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """What a rank records where memory runs out on the ``failing`` ones, alone or in a ring of two."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with runs_out("layer", 1, 4) if rank in failing else runs_out("layer", 99, 0):
        group = world() if cp == 2 else alone
        samples = measure_modules(context(), cp, group, PLAIN, Sizes((1, 2), (2, 4, 8), runs=1), PLENTY)
    return [(s.module, s.num_layers, s.microbatch_size, s.out_of_memory, s.memory) for s in samples]


@pytest.mark.ranks
@pytest.mark.parametrize(("cp", "failing"), [(1, (1,)), (2, (0, 1))])
def test_all_ranks_record_what_ran_out_on_one_and_go_on(cp: int, failing: tuple[int, ...]) -> None:
    first, second = run_ranks(2, samples_of, cp, failing)
    assert first == second
    layers = [sample[1:4] for sample in first if sample[0] == "layer"]
    assert layers == [(1, 2, False), (1, 4, True), (2, 2, False)]
    assert [sample[2] for sample in first if sample[0] == "head"] == [2, 4, 8]


def sample(layers: int, size: int, *, parameters: int = 0, moving: int = 0, out_of_memory: bool = False) -> Any:
    memory = {"parameters": parameters, "saved": moving // 2, "forward_peak": moving // 2, "batch": 0}
    return ComputeSample(
        module="layer",
        num_layers=layers,
        cp=1,
        rows=7,
        sequence_rows=7,
        microbatch_size=size,
        forward_s=1.0,
        backward_s=1.0,
        memory=memory | {"backward_peak": moving - moving // 2},
        samples_s=[],
        out_of_memory=out_of_memory,
    )


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("may_try", [False, True])
def test_a_size_beyond_the_room_is_left_out_by_what_smaller_ones_took(cp: int, may_try: bool) -> None:
    """2 layers at 4 sequences took 4 x 100 + 800 bytes: 4 layers at 8 take at most 8 x 100 + 4 x 800 = 4000."""
    samples = [sample(1, 1, parameters=50, moving=500), sample(2, 4, parameters=100, moving=800)]
    subject = Subject("layer", 4, cp, PLAIN, "host")
    assert Room(4000, may_try).allows(samples, subject, 8)
    # A rank that exchanges nothing may let the device say no; one that others wait for may not.
    assert Room(3999, may_try).allows(samples, subject, 8) == (may_try and cp == 1)
    assert Room(1, may_try).allows([], subject, 8)


def test_no_more_is_tried_than_what_ran_out() -> None:
    samples = [sample(2, 4, out_of_memory=True)]
    for layers, size, allowed in ((2, 4, False), (3, 4, False), (2, 5, False), (1, 8, True), (8, 3, True)):
        assert PLENTY.allows(samples, Subject("layer", layers, 1, PLAIN, "host"), size) == allowed


def test_sequences_are_tried_from_one_on_and_never_past_the_memory(alone: None) -> None:
    with runs_out("layer", 99, 0) as tried:
        assert try_microbatches(context(), world(), 1e9, 1e15).largest > BATCH
        assert sorted(set(tried)) == [1, 2, 4, BATCH]
    with runs_out("layer", 99, 0) as tried:
        assert try_microbatches(context(), world(), 1e9, 1.0).largest == 1
        assert set(tried) == {1}
    with runs_out("layer", 99, 0) as tried:
        assert try_microbatches(context(), world(), 1e-9, 1e15).largest == 1
        assert set(tried) == {1}


@pytest.mark.parametrize(
    ("device", "batch_size", "tried", "largest"),
    [
        # 1 ms for up to 500 sequences, then 2 us for each: 0.2 s are 100,000 sequences, 32 tell of no more than 6400.
        ("cuda", 200_000, [2**n for n in range(17)], 100_000),
        ("cuda", 300, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300], 60_000),
        ("cpu", 200_000, [1, 2, 4, 8, 16, 32], 6400),
    ],
)
def test_on_cuda_sequences_double_until_the_layer_takes_as_long_as_is_asked(
    alone: None, monkeypatch: pytest.MonkeyPatch, device: str, batch_size: int, tried: list[int], largest: int
) -> None:
    sizes = []

    def planted(_: Probe, size: int) -> measure_compute._Taken:
        sizes.append(size)
        return measure_compute._Taken(max(1e-3, 2e-6 * size), 1)

    monkeypatch.setattr(measure_compute, "Probe", mock.Mock())
    monkeypatch.setattr(measure_compute, "_tried", planted)
    made = context()
    batch = made.workload.batch.model_copy(update={"batch_size": batch_size})
    made = replace(made, workload=made.workload.model_copy(update={"batch": batch}), device=torch.device(device))
    found = try_microbatches(made, world(), 0.2, 1e15)
    assert sizes == tried
    assert found.largest == pytest.approx(largest, abs=1)


def test_a_trial_that_runs_out_ends_below_it(alone: None) -> None:
    with runs_out("layer", 1, 4) as tried:
        found = try_microbatches(context(), world(), 1e9, 1e15)
    assert found.largest == 3
    assert found.sequence_s > 0
    assert set(tried) == {1, 2, 4}
    with runs_out("layer", 1, 1), pytest.raises(MgraphError, match="one sequence") as caught:
        try_microbatches(context(), world(), 1e9, 1e15)
    assert caught.value.exit_code == EXIT_INFEASIBLE
