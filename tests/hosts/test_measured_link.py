"""What the profile measures of a slow link is what the link allows."""

from __future__ import annotations

import json

import pytest
from bench.parts.slow_link import missing, run_on_both

from megagraph_cli.artifacts.profile import CommSample
from tests.hosts.link_measurer import BYTES_PER_S, MESSAGE_BYTES

BURST_BYTES = 64_000
"""Passes at once after a pause (`tc`'s 64kb)."""


@pytest.mark.ranks
def test_a_limited_link_is_seen() -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    first, second = (json.loads(out) for out in run_on_both(["-m", "tests.hosts.link_measurer"], deadline_s=120))
    assert first == second  # the slowest rank's
    for sample in map(CommSample.model_validate, first):
        assert sample.link == "network"
        # Two ranks send each other all of a message in a sum, in halves, and each its own one in a gather: no faster
        # than the link takes one message.
        assert sample.time_s >= (MESSAGE_BYTES - BURST_BYTES) / BYTES_PER_S
