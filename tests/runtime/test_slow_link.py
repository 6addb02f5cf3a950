"""Two hosts and a slow link between them: the same losses, and as many bytes on the cable as the formula says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench.parts.slow_link import missing, run_on_both

from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device
from tests.runtime.link_worker import BATCH, STEPS
from tests.runtime.small import CPU, make_parts, make_plan, small_graph, small_workload

WORKER = "tests.runtime.link_worker"
# float64; the split changes the order of sums.
TOLERANCE = 1e-10
HEADERS = 1.1
"""Ethernet, IP and TCP headers of full segments are 5 %; acknowledgements of what the other host sends come on top."""
MESSAGES_BYTES = 60_000
"""Rendezvous of all messages, barriers and short sums: some hundreds of packets."""


def losses_alone() -> list[float]:
    graph = small_graph()
    workload = small_workload(graph, model={"hidden_dim": 64}, batch={"batch_size": BATCH})
    train = TrainStep(make_parts(make_plan(workload), graph))
    losses = []
    for step in range(STEPS):
        (batch,) = train.parts.builder.build(np.arange(BATCH), epoch=1, view=0)
        losses.append(float(train.run([to_device(batch, CPU)], step=step, num_targets=BATCH, lr=0.01)[0]))
    return losses


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("pp", "cp"), [(1, 2), (2, 1)])
def test_two_hosts_send_what_is_reckoned(pp: int, cp: int) -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    found = [json.loads(output) for output in run_on_both(["-m", WORKER, str(pp), str(cp)], deadline_s=300)]
    expected = losses_alone()
    for host in found:
        assert np.max(np.abs(np.array(host["losses"]) / np.array(expected) - 1)) <= TOLERANCE
    sent, reckoned = (sum(host[name] for host in found) for name in ("sent", "reckoned"))
    assert reckoned > 500_000
    assert reckoned <= sent <= HEADERS * reckoned + MESSAGES_BYTES
