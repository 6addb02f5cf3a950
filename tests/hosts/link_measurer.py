"""One of two ranks on hosts joined by a limited link: measures it as the profile does."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from bench.parts.slow_link import limit

from megagraph_cli.runtime.measure_links import measure_all_gather, measure_all_reduce, measure_p2p

BYTES_PER_S, MESSAGE_BYTES = 10e6, 1 << 20


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    limit(BYTES_PER_S)
    cpu = torch.device("cpu")
    samples = [
        measure_p2p(cpu, MESSAGE_BYTES, (0, 1), "network"),
        measure_all_reduce(cpu, dist.group.WORLD, 2, MESSAGE_BYTES, "network"),
        measure_all_gather(cpu, dist.group.WORLD, 2, 2 * MESSAGE_BYTES, "network"),
    ]
    print(json.dumps([sample.model_dump(mode="json") for sample in samples]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
