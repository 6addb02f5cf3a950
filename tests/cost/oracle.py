"""The search's answers by plain enumeration, written from the cost model's definition alone.

It shares no code with ``megagraph_cli.cost``: its own splits, its own simulation, its own sums of seconds and bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

Terms = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Answer:
    step_s: float
    peak: int
    need: int
    pp: int
    dp: int
    cp: int
    count: int
    schedule: str
    recompute: str
    context: str
    split: tuple[int, ...]
    crossing: frozenset[str]


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for head in range(1, total - parts + 2):
        for rest in splits(total - head, parts - 1):
            yield (head, *rest)


def makespan(forward: list[float], backward: list[float], transfer: float, count: int, schedule: str) -> float:
    """End of the last work: each piece starts when its stage is free and its message is there.

    A message leaves when its sender is done and the receiver has taken the one before.
    """
    pp = len(forward)

    def queue(stage: int) -> list[tuple[str, int]]:
        if schedule == "gpipe":
            return [("F", m) for m in range(count)] + [("B", m) for m in range(count)]
        warm = min(count, pp - stage)
        steady = [piece for m in range(count - warm) for piece in (("B", m), ("F", m + warm))]
        return [("F", m) for m in range(warm)] + steady + [("B", m) for m in range(count - warm, count)]

    queues = [queue(stage) for stage in range(pp)]
    end: dict[tuple[str, int, int], float] = {}
    taken: dict[tuple[str, int], float] = {}
    clock, done = [0.0] * pp, [0] * pp
    while len(end) < 2 * pp * count:
        for stage in range(pp):
            while done[stage] < 2 * count:
                kind, m = queues[stage][done[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < pp:
                    if (kind, source, m) not in end:
                        break
                    leaves = max(end[kind, source, m], taken.get((kind, stage), 0.0))
                    clock[stage] = max(clock[stage], leaves + transfer)
                taken[kind, stage] = clock[stage]
                clock[stage] += forward[stage] if kind == "F" else backward[stage]
                end[kind, stage, m] = clock[stage]
                done[stage] += 1
    return max(clock)


def over(crossing: frozenset[str], *axes: str) -> str:
    """What the name of a term has more where one of these axes crosses hosts."""
    return "_network" if crossing.intersection(axes) else ""


class Oracle:
    """Everything predicted from a cost model's JSON values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.terms: Terms = values["terms"]
        self.machine = values["machine"]
        self.hosts = self.machine["hosts"]
        work = values["workload"]
        self.num_layers = work["model"]["num_layers"]
        self.d, f = work["model"]["hidden_dim"], work["model"]["ffn_dim"]
        heads, powers = work["model"]["num_heads"], work["model"]["bias_powers"]
        batch, graph = work["batch"], work["graph"]
        self.batch_size = batch["batch_size"]
        self.drawn = batch["num_sampled"] + batch["num_super"]
        self.rows = batch["num_sampled"] + batch["num_super"] + batch["num_global"]
        d, tokens = self.d, batch["num_global"]
        self.input_parameters = graph["features"] * d + d + tokens * d
        self.layer_parameters = 4 * (d * d + d) + powers * heads + heads + 4 * d + d * f + f + f * d + d
        self.head_parameters = 2 * d + d * graph["classes"] + graph["classes"]
        self.pool = graph["nodes"] + graph["clusters"]
        self.shared_parameters = tokens * powers
        # Splits share their stages: each stage's figures are worked out once.
        self.seconds = cache(self._seconds)
        self.tail = cache(self._tail)
        self.peak = cache(self._peak)

    def term(self, quantity: str, **values: float) -> float:
        found = self.terms[quantity]
        return sum(found.get(name.replace("__", "."), 0.0) * value for name, value in values.items())

    def _seconds(
        self,
        quantity: str,
        b: int,
        r: int,
        cp: int,
        middle: int,
        first: bool,
        last: bool,
        way: tuple[str, str],
        crossing: frozenset[str],
    ) -> float:
        t, a, h = b * r, b * r * r * cp, cp - 1
        joined, again = (1 if cp > 1 else 0), "" if way[0] == "none" else "_full"
        found = self.terms[quantity]

        def layer(name: str, **values: float) -> float:
            return sum(found.get(f"{name}{again}.{key}", 0.0) * value for key, value in values.items())

        total = self.term(quantity, stage__call=1, stage__sequences=b, stage__rows=t, stage__channels=a)
        wire = over(crossing, "cp")
        travel = {way[1] + wire: joined, f"{way[1]}{wire}_hop": h, f"{way[1]}{wire}_rows": h * t}
        slow = self.slow(middle, b, r)
        total += middle * (slow * layer("layer", call=1, rows=t, scores=a) + layer("layer", **travel))
        if last:
            ring = {f"ring{wire}": joined, f"ring{wire}_hop": h, f"ring{wire}_rows": h * t}
            total += layer("last_layer", call=1, rows=t, targets=b, **ring)
            total += self.term(quantity, head__call=1, head__targets=b, head__rows=t)
        if first:
            total += self.term(quantity, input__call=1, input__rows=t)
        return total

    def slow(self, middle: int, b: int, r: int) -> float:
        """By how much a layer of a stage with so many takes longer: the cache break."""
        broken = self.terms.get("cache")
        if broken is None:
            return 1.0
        held = middle * {"layers": 1, "sequences": b, "rows": b * r}[self.cache_unit()]
        return broken["cache_penalty"] if held > broken[f"break_{self.cache_unit()}"] else 1.0

    def cache_unit(self) -> str:
        return next(unit for unit in ("layers", "sequences", "rows") if f"break_{unit}" in self.terms["cache"])

    def weights(self, layers: int, first: bool, last: bool) -> int:
        held = self.shared_parameters + layers * self.layer_parameters
        return 4 * (held + first * self.input_parameters + last * self.head_parameters)

    def all_reduce(self, size: float, group: int, wire: str) -> float:
        if group == 1:
            return 0.0
        hops = group - 1
        ring = 2 * hops * size / group
        return self.term(f"all_reduce{wire}_s", call=1, hop=hops, bytes=ring, contention_bytes=hops * size)

    def _tail(self, layers: int, first: bool, last: bool, pp: int, dp: int, cp: int, crossing: frozenset[str]) -> float:
        size = self.weights(layers, first, last)
        total = self.term("optimizer_s", optimizer__call=1, optimizer__bytes=size)
        total += self.all_reduce(size, dp * cp, over(crossing, "dp", "cp"))
        total += self.all_reduce(4 * self.shared_parameters, pp, over(crossing, "pp"))
        return total + self.all_reduce(24, pp * dp * cp, over(crossing, "pp", "dp", "cp"))

    def saved(
        self, b: int, r: int, cp: int, middle: int, first: bool, last: bool, recompute: str
    ) -> list[tuple[str, float]]:
        """(module, bytes saved) in forward order."""
        t, a, found = b * r, b * r * r * cp, []
        again, kept = "" if recompute == "none" else "_full", self.terms["saved_bytes"]

        def layer(name: str, **values: float) -> float:
            return sum(kept.get(f"{name}{again}.{key}", 0.0) * value for key, value in values.items())

        if first:
            found.append(("input", self.term("saved_bytes", input__call=1, input__rows=t)))
        layers = self.term("saved_bytes", stage__call=1, stage__sequences=b, stage__channels=a)
        where = {"local_rows": t} if cp == 1 else {"spread_rows": t}
        layers += middle * layer("layer", call=1, rows=t, scores=a, **where)
        found.append(("layer", layers))
        if last:
            found.append(("last_layer", layer("last_layer", call=1, rows=t, targets=b, **where)))
            found.append(("head", self.term("saved_bytes", head__call=1, head__targets=b, head__rows=t)))
        return found

    def distinct(self, draws: int, pool: float) -> float:
        """Rows that so many even draws from so many are expected to touch."""
        return pool * (1 - math.exp(-draws / pool))

    def working(self, quantity: str, module: str, b: int, r: int, cp: int, way: tuple[str, str]) -> float:
        t = b * r
        values: dict[str, float] = {"call": 1, "sequences": b, "rows": t, "scores": b * r * r * cp}
        name = module
        if module == "input":
            draws = b * min(r, self.drawn)
            values |= {"distinct": self.distinct(draws, self.pool), "often": self.distinct(draws, self.pool / 8)}
        if module in ("layer", "last_layer"):
            name += "" if way[0] == "none" else "_full"
            if cp > 1:
                gathered = module == "layer" and way[1] == "allgather"
                values |= {"allgather_rows": cp * t, "allgather_own_rows": t} if gathered else {"ring_rows": t}
        growing = self.term(quantity, **{f"{name}__{key}": value for key, value in values.items()})
        floor = self.terms.get(quantity.replace("transient", "floor"), {})
        at_least = max(growing, floor.get(f"{name}.call", 0.0) - floor.get(f"{name}.less_rows", 0.0) * t)
        if (quantity, module, way[1]) == ("backward_transient_bytes", "layer", "ring") and cp > 1:
            # Own block in two halves: gradients of the first half's keys and values wait for the last hop.
            at_least += (
                2 * math.ceil(b / 2) * r * self.d * 4 * (b * r * r >= 32768 * self.terms["threads"]["per_worker"])
            )
        return at_least

    def _peak(
        self,
        b: int,
        r: int,
        cp: int,
        layers: int,
        first: bool,
        last: bool,
        count: int,
        held: int,
        way: tuple[str, str],
    ) -> int:
        middle = layers - last
        weights = self.weights(layers, first, last)
        modules = self.saved(b, r, cp, middle, first, last, way[0])
        saved = sum(size for _, size in modules)
        batches = {m: self.term("batch_bytes", **{f"{m}__sequences": b, f"{m}__rows": b * r}) for m, _ in modules}
        if first:
            draws = b * min(r, self.drawn)
            batches["input"] += self.term("batch_bytes", input__distinct=self.distinct(draws, self.pool))
            batches["input"] += self.term("batch_bytes", input__often=self.distinct(draws, self.pool / 8))
        if not middle:
            batches["layer"] = 0.0
        batch = max(batches["layer"], batches.get("last_layer", 0.0)) + batches.get("input", 0.0)
        batch += batches.get("head", 0.0)
        message = b * r * self.d * 4
        # Posted or in use: x held and one more, gradients one, and two in a backward. Leaving: two gradients, then one.
        boundaries = {
            "forward_transient_bytes": message * (min(count, held + 1 + 2) * (not first) + (not last)),
            "backward_transient_bytes": message * (min(count, held + 1 + 1) * (not first) + min(count, 2) * (not last)),
        }
        fixed = 4 * weights + math.ceil(count * batch)
        peaks = []
        for quantity, boundary in boundaries.items():
            so_far, most = 0.0, 0.0
            for module, size in modules:
                so_far += size
                extra = self.working(quantity, module, b, r, cp, way) if middle or module != "layer" else 0.0
                most = max(most, so_far + extra)
            peaks.append(fixed + boundary + math.ceil(held * saved) + math.ceil(max(0.0, most - saved)))
        step = self.term("optimizer_transient_bytes", optimizer__call=1, optimizer__bytes=weights)
        return max(*peaks, fixed + math.ceil(step))

    def plan(
        self,
        pp: int,
        dp: int,
        cp: int,
        count: int,
        schedule: str,
        way: tuple[str, str],
        split: tuple[int, ...],
        crossing: frozenset[str],
        peers: int,
    ) -> Answer:
        b, r = -(-self.batch_size // (dp * count)), -(-self.rows // cp)
        places = [(layers, s == 0, s == pp - 1) for s, layers in enumerate(split)]
        forward, backward = (
            [self.seconds(name, b, r, cp, n - last, first, last, way, crossing) for n, first, last in places]
            for name in ("forward_s", "backward_s")
        )
        boundary = f"p2p{over(crossing, 'pp')}_s"
        transfer = self.term(boundary, call=1, bytes=b * r * self.d * 4) if pp > 1 else 0.0
        step = makespan(forward, backward, transfer, count, schedule)
        step += max(self.tail(n, first, last, pp, dp, cp, crossing) for n, first, last in places)
        threads = self.terms["threads"]["per_worker"]
        # The ranks of a replica on one host share its sequences out; each gathers what it embeds.
        host = self.term("construct_s", call=1, targets=-(-b * count // peers) / threads)
        host += self.term("gather_s", call=1, targets=b * count / threads)
        held = [1 if pp == 1 else count if schedule == "gpipe" else min(count, pp - s) for s in range(pp)]
        peaks = [
            self.peak(b, r, cp, n, first, last, count, k, way) for (n, first, last), k in zip(places, held, strict=True)
        ]
        peak = max(peaks)
        need = peak + math.ceil(self.terms["margin"]["relative"] * peak) + self.machine["overhead_bytes"]
        return Answer(step + host, peak, need, pp, dp, cp, count, schedule, *way, split, crossing)

    def plans(self, gpus: int) -> Iterator[Answer]:
        """Every plan on ``gpus`` workers."""
        for pp, dp, cp in itertools.product(range(1, gpus + 1), repeat=3):
            if pp * dp * cp != gpus or pp > self.num_layers or cp > self.rows or dp > self.batch_size:
                continue
            for count, schedule in self.orders(pp, dp):
                for way in itertools.product(("none", "full"), ("ring", "allgather") if cp > 1 else ("ring",)):
                    for split, lies in itertools.product(splits(self.num_layers, pp), self.layouts(pp, dp, cp)):
                        yield self.plan(pp, dp, cp, count, schedule, way, split, *lies)

    def layouts(self, pp: int, dp: int, cp: int) -> set[tuple[frozenset[str], int]]:
        """(axes that cross hosts, fewest ranks that a replica has on a host that it is on) of all orders of the axes.

        Ranks are numbered row-major in an order, and each host has as many, one host after the other.
        """
        degrees, per_host = {"pp": pp, "dp": dp, "cp": cp}, pp * dp * cp // self.hosts
        found = set()
        for order in itertools.permutations(degrees):
            host_at = {}
            for rank, place in enumerate(itertools.product(*(range(degrees[axis]) for axis in order))):
                host_at[tuple(place[order.index(axis)] for axis in degrees)] = rank // per_host
            crossing = set()
            for place, host in host_at.items():
                for index, axis in enumerate(degrees):
                    after = tuple(number + (each == index) for each, number in enumerate(place))
                    if host_at.get(after, host) != host:
                        crossing.add(axis)
            shares = Counter((place[1], host) for place, host in host_at.items())
            found.add((frozenset(crossing), min(shares.values())))
        return found

    def orders(self, pp: int, dp: int) -> Iterator[tuple[int, str]]:
        """(K, schedule)."""
        replica = -(-self.batch_size // dp)
        for count in range(1, 4 * pp + 1):
            if replica % count or dp * count > self.batch_size:
                continue
            for schedule in ("gpipe", "1f1b"):
                if schedule == "gpipe" or 1 < pp <= count:
                    yield count, schedule
