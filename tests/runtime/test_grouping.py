"""Which ranks are measured together, within hosts and across them."""

from __future__ import annotations

import pytest

from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.layout.placement import MESH_ORDERS
from megagraph_cli.runtime.grouping import Grouping


def test_one_host_has_no_network() -> None:
    alone = Grouping(4, 1)
    assert [alone.links(degree) for degree in (2, 3, 4)] == [["host"]] * 3
    assert alone.groups(2, "host") == [[0, 1], [2, 3]]
    assert alone.groups(3, "host") == [[0, 1, 2]]


def test_groups_stay_on_a_host_or_take_equally_many_ranks_of_each() -> None:
    two = Grouping(4, 2)
    assert [two.links(degree) for degree in (2, 3, 4)] == [["host", "network"], ["network"], ["network"]]
    assert two.groups(2, "host") == [[0, 1], [2, 3]]
    assert two.groups(2, "network") == [[0, 2], [1, 3]]
    assert two.groups(3, "network") == [[0, 1, 2]]
    assert two.groups(4, "network") == [[0, 1, 2, 3]]
    assert Grouping(2, 2).links(2) == ["network"]


@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (8, 2), (8, 4), (12, 3)])
def test_groups_across_hosts_lie_as_a_plans_outermost_axis_does(size: int, hosts: int) -> None:
    for degree in range(hosts, size + 1, hosts):
        if size % degree:
            continue
        dims, order = ParallelDims(pp=degree, dp=size // degree, cp=1), MESH_ORDERS[0]
        planned: dict[int, list[int]] = {}
        for rank in range(size):
            planned.setdefault(dims.place(rank, order).dp, []).append(rank)
        found = Grouping(size, hosts).groups(degree, "network")
        per_host = size // hosts
        assert len(found) == len(planned)
        assert sorted(rank for group in found for rank in group) == list(range(size))
        for groups in (found, list(planned.values())):  # each with equally many ranks of every host
            for group in groups:
                assert [rank // per_host for rank in group] == sorted(rank // per_host for rank in group)
                assert len({rank // per_host for rank in group}) == hosts


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (6, 3), (8, 4), (9, 3)])
def test_messages_are_measured_between_hosts_whatever_their_number(size: int, hosts: int) -> None:
    grouping = Grouping(size, hosts)
    assert grouping.pair_links() == (["host", "network"] if size > hosts else ["network"])
    for link in grouping.pair_links():
        pairs = grouping.pairs(link)
        assert pairs
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        for first, second in pairs:
            assert (second // grouping.per_host - first // grouping.per_host) == (1 if link == "network" else 0)
