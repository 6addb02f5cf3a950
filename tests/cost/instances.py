"""Random cost models: coefficients over wide ranges, so that every part can be the one that decides."""

from __future__ import annotations

import random
from functools import cache

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.fitting import fit
from tests.cost import planted

_SCALE = {
    "forward_s": 1e-4,
    "backward_s": 2e-4,
    "saved_bytes": 2e3,
    "forward_transient_bytes": 4e3,
    "backward_transient_bytes": 8e3,
    "batch_bytes": 50.0,
}


@cache
def _fitted(*, network: bool) -> CostModel:
    """What is planted depends on neither layers nor batch, so one fit is that of every workload."""
    return fit(planted.two_hosts() if network else planted.profile(gpus=4))


def random_cost_model(rng: random.Random, num_layers: int, batch_size: int, hosts: int = 1) -> CostModel:
    """A cost model with the terms of a real fit, those of the network between hosts too, and random values in them."""
    fitted = _fitted(network=hosts > 1)
    machine = fitted.machine.model_copy(update={"hosts": hosts})
    fitted = fitted.model_copy(update={"workload": planted.workload(num_layers, batch_size), "machine": machine})
    terms = {quantity: dict(values) for quantity, values in fitted.terms.items()}
    for quantity, values in terms.items():
        for name in values:
            if quantity in _SCALE:
                values[name] = _drawn(rng, name, _SCALE[quantity])
    for quantity in ("forward", "backward"):
        for module in ("layer", "last_layer_full"):
            if rng.random() < 0.3:
                floor = {f"{module}.call": rng.choice([1e4, 1e6]), f"{module}.less_rows": rng.choice([0.0, 500.0])}
                terms[f"{quantity}_floor_bytes"] = terms.get(f"{quantity}_floor_bytes", {}) | floor
    ratio = rng.choice([0.0, 0.5, 2.0])
    for name in terms["backward_s"]:
        # Half of the models have a backward in proportion to the forward, as real ones nearly do.
        if ratio:
            terms["backward_s"][name] = ratio * terms["forward_s"][name]
    terms["p2p_s"] = {"call": rng.choice([0.0, 1e-4, 3e-3]), "bytes": rng.choice([0.0, 1e-9, 1e-7])}
    terms["all_reduce_s"] = {"call": 0.0, "hop": 1e-4, "bytes": rng.choice([1e-10, 1e-7]), "contention_bytes": 0.0}
    if hosts > 1:
        terms["p2p_network_s"] = {"call": rng.choice([0.0, 1e-3, 1e-2]), "bytes": rng.choice([1e-9, 1e-7, 1e-6])}
        reduce = {"hop": rng.choice([1e-4, 1e-3]), "bytes": rng.choice([1e-10, 1e-8, 1e-6])}
        terms["all_reduce_network_s"] = {"call": 0.0, "contention_bytes": 0.0} | reduce
    terms["optimizer_s"] = {"optimizer.call": 1e-4, "optimizer.bytes": rng.choice([0.0, 1e-8])}
    terms["construct_s"] = {"call": 0.0, "targets": rng.choice([1e-6, 1e-6, 2e-3])}
    if rng.random() < 0.4:
        unit, typical = rng.choice([("layers", 1), ("sequences", 2), ("rows", 20)])
        most = float(typical * rng.choice([0, 1, 2, 3, 5, 8]))
        terms["cache"] = {"cache_penalty": rng.choice([1.1, 1.68, 3.0]), f"break_{unit}": most}
    terms["margin"] = {"relative": rng.choice([0.0, 0.013, 0.05])}
    return fitted.model_copy(update={"terms": terms})


def _drawn(rng: random.Random, name: str, scale: float) -> float:
    """Zero now and then; otherwise a coefficient that matters at some 10 sequences of 17 rows."""
    if rng.random() < 0.25:
        return 0.0
    per = {
        "call": 1.0,
        "ring": 1.0,
        "allgather": 1.0,
        "hop": 1.0,
        "targets": 10.0,
        "sequences": 10.0,
        "scores": 2890.0,
        "channels": 2890.0,
    }
    key = name.split(".")[1].replace("_network", "").removeprefix("ring_").removeprefix("allgather_")
    size = per.get(key, 170.0)
    return scale * 10 ** rng.uniform(-1, 1) * (50 if name.endswith("bytes") else 10) / size
