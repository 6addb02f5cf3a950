"""Several hosts: terms of the network between them are learnt apart, and the search chooses which axis crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megagraph_cli.artifacts.profile import CommSample, ComputeSample, Profile
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import search
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins, settings
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.layout.placement import MESH_ORDERS, placement
from tests.cost import planted

PLENTY = 10**12


def stretched(sample: Any, factor: float) -> Any:
    """The same sample over the network."""
    if isinstance(sample, CommSample):
        seconds = sample.time_s * factor
        return sample.model_copy(update={"link": "network", "time_s": seconds, "samples_s": [seconds] * 3})
    passes = {"forward_s": sample.forward_s * factor, "backward_s": sample.backward_s * factor}
    return sample.model_copy(update={"link": "network"} | passes)


def two_hosts(*, p2p: float = 1.0, reduce: float = 1.0, ring: float = 1.0) -> Profile:
    """Four workers on two hosts; what the network between these takes, as multiples of what a host takes."""
    one = planted.profile(gpus=4)
    slow = {"p2p": p2p, "all_reduce": reduce, "all_gather": reduce}
    comm = [each for each in one.comm if each.group_size == 2]
    comm += [stretched(each, slow[each.op]) for each in one.comm if each.group_size % 2 == 0]
    compute = [each for each in one.compute if each.cp <= 2]
    layers = [each for each in one.compute if each.cp > 1 and each.module in ("layer", "last_layer")]
    compute += [stretched(each, ring) for each in layers]
    machine = one.machine.model_copy(update={"hosts": 2})
    return one.model_copy(update={"machine": machine, "comm": comm, "compute": compute})


def predictor(profile: Profile) -> Predictor:
    return Predictor(fit(profile), profile.workload)


@pytest.mark.parametrize(
    ("order", "crossing", "peers"),
    [
        (("pp", "dp", "cp"), {"pp"}, 2),
        (("dp", "pp", "cp"), {"dp"}, 4),
        (("cp", "pp", "dp"), {"cp"}, 2),
    ],
)
def test_the_outermost_axis_crosses_hosts(order: tuple[str, ...], crossing: set[str], peers: int) -> None:
    found = placement(ParallelDims(pp=2, dp=2, cp=2), order, 2)
    assert (found.crossing, found.peers) == (crossing, peers)
    assert placement(ParallelDims(pp=2, dp=2, cp=2), order, 1).crossing == frozenset()


def test_what_does_not_fit_on_a_host_crosses_too() -> None:
    found = placement(
        ParallelDims(pp=3, dp=1, cp=2), MESH_ORDERS[0], 2
    )  # three ranks each: the middle stage is on both
    assert found.crossing == {"pp", "cp"}
    assert found.peers == 3


def test_links_are_learnt_apart() -> None:
    cost_model = fit(two_hosts(p2p=10, reduce=20, ring=3))
    terms = cost_model.terms
    assert terms["p2p_network_s"]["bytes"] == pytest.approx(10 * terms["p2p_s"]["bytes"], rel=1e-6)
    assert {"layer.ring_rows", "layer.ring_network_rows", "layer_full.allgather_network_rows"} <= set(
        terms["forward_s"]
    )
    alone = fit(planted.profile(gpus=4)).terms
    assert not [name for name in (*alone, *alone["forward_s"]) if "network" in name]


@pytest.mark.parametrize(
    ("slow", "quiet", "dims"),
    [
        ({"reduce": 300.0, "ring": 300.0}, "pp", {"pp": 2}),
        ({"p2p": 30000.0, "ring": 300.0}, "dp", {"dp": 2}),
        ({"p2p": 30000.0, "reduce": 30000.0}, "cp", {"cp": 2, "pp": 2}),
    ],
)
def test_the_quiet_axis_is_put_across_the_slow_link(slow: dict[str, float], quiet: str, dims: dict[str, int]) -> None:
    """Among plans of the same degrees; and no other order of the axes is foretold to be faster."""
    mine = predictor(two_hosts(**slow))
    best = search(mine, 4, PLENTY, Pins(**dims), 0).best
    assert best.setting.mesh_order[0] == quiet
    for order in range(len(MESH_ORDERS)):
        other = replace(best.setting, order=order)
        assert mine.step_s(other, best.choice.split) >= best.choice.step_s * (1 - 1e-9)


def test_a_search_over_hosts_is_the_least_over_all_orders() -> None:
    mine = predictor(two_hosts(p2p=5, reduce=40, ring=7))
    best = search(mine, 4, PLENTY, Pins(), 0).best
    pinned = [search(mine, 4, PLENTY, Pins(pp=pp), 0).best.choice.step_s for pp in (1, 2, 4)]
    assert best.choice.step_s == min(pinned)
    assert {setting.mesh_order[0] for setting in mine.settings(4, Pins())} == {"pp", "dp", "cp"}
    assert {setting.order for setting in predictor(planted.profile(gpus=4)).settings(4, Pins())} == {0}


def test_every_order_that_lies_differently_on_the_hosts_is_tried() -> None:
    dims = ParallelDims(pp=2, dp=2, cp=2)

    def crossing(hosts: int) -> list[frozenset[str]]:
        tried = settings(
            planted.workload(), dims.size, Pins(pp=2, dp=2, cp=2, num_microbatches=2, schedule="gpipe"), hosts
        )
        return [
            placement(dims, each.mesh_order, hosts).crossing
            for each in tried
            if each == replace(tried[0], order=each.order)
        ]

    assert crossing(1) == [frozenset()]
    assert sorted(map(sorted, crossing(2))) == [["cp"], ["dp"], ["pp"]]
    assert sorted(map(sorted, crossing(4))) == [["cp", "dp"], ["cp", "pp"], ["dp", "pp"]]


def test_a_network_that_was_never_measured_is_named_with_its_remedy() -> None:
    profile = two_hosts()
    bare = profile.model_copy(update={"comm": [each for each in profile.comm if each.link == "host"]})
    with pytest.raises(MgraphError, match=r"network.*--nnodes 2 --node-rank I --rdzv-endpoint HOST:PORT") as caught:
        search(predictor(bare), 4, PLENTY, Pins(), 0)
    assert caught.value.exit_code == EXIT_STALE


def test_sequences_are_shared_within_a_host_alone() -> None:
    mine = predictor(two_hosts())
    across = Setting(ParallelDims(pp=2, dp=1, cp=2), 4, "gpipe", order=0)
    alone = predictor(planted.profile(gpus=4))
    halves, quarters = mine.host_s(across), alone.host_s(across)
    terms = alone.terms["construct_s"]
    targets = planted.workload().batch.batch_size
    assert halves - quarters == pytest.approx(terms.get("targets", 0.0) * targets / 4, rel=1e-6)


def test_a_sample_says_its_link_only_over_the_network() -> None:
    layer = next(each for each in planted.profile(gpus=2).compute if each.cp == 2)
    assert "link" not in layer.model_dump()
    over = stretched(layer, 2.0)
    assert ComputeSample.model_validate(over.model_dump()).link == "network"
