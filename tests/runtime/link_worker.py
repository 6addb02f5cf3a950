"""One of two ranks on hosts joined by a slow link: trains a few steps and tells what was sent, reckoned and real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bench.parts.slow_link import DEVICE, limit

from megagraph_cli.graph.batch import replica_targets
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device
from tests.runtime.small import CPU, make_parts, make_plan, small_graph, small_workload
from tests.wire_counter import counted

BATCH, STEPS, BYTES_PER_S = 32, 3, 20e6


def transmitted_bytes() -> int:
    """What the kernel has put on this host's end of the link."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def main(pp: int, cp: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    graph = small_graph()
    workload = small_workload(graph, model={"hidden_dim": 64}, batch={"batch_size": BATCH})
    plan = make_plan(workload, pp=pp, cp=cp, layers=(1, 2) if pp == 2 else (3,), num_microbatches=2)
    train = TrainStep(make_parts(plan, graph))
    targets = np.arange(BATCH)
    share = replica_targets(targets, BATCH, 1, 0, 2)
    limit(BYTES_PER_S)
    dist.barrier()
    before, reckoned, losses = transmitted_bytes(), 0, []
    for step in range(STEPS):
        batch = [to_device(part, CPU) for part in train.parts.builder.build(share, epoch=1, view=0)]
        with counted(train.parts.mesh) as counts:
            summary = train.run(batch, step=step, num_targets=BATCH, lr=0.01)
        reckoned += int(sum(counts.values()))
        losses.append(float(summary[0]))
    dist.barrier()
    print(json.dumps({"sent": transmitted_bytes() - before, "reckoned": reckoned, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
