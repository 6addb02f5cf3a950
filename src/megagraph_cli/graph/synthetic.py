"""Generated graphs: ``synthetic:...`` of any size, and the packaged ``demo``.

Power-law degrees (Chung-Lu weights) over communities: both ends of an edge are drawn by weight, the second one
within the first one's community most of the time. Features are Gaussian around one centre per class.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.raw import MAX_NODES, RawGraph

PREFIX = "synthetic:"
_HELP = "write synthetic:nodes=1000,edges=5000,features=16,classes=4,seed=0"
_EXPONENT = 2.5
"""Of the degree distribution, as in many real networks."""
_INSIDE = 0.75
"""Fraction of edges drawn within a community."""
_COMMUNITY_NODES = 400
_ROUNDS_BY_WEIGHT = 4
"""Rounds after which missing edges are drawn uniformly: hubs and small communities are full by then."""


@dataclass(frozen=True)
class Spec:
    """The sizes of a synthetic graph; edges are undirected, unique and without self-loops."""

    nodes: int
    edges: int
    features: int = 0
    classes: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        """The one spelling of these sizes."""
        return PREFIX + ",".join(f"{key}={value}" for key, value in asdict(self).items())


def parse_spec(name: str) -> Spec:
    """The sizes that ``synthetic:nodes=..,edges=..,features=..,classes=..,seed=..`` asks for.

    ``nodes`` and ``edges`` are required. Raises MgraphError (exit 2) on an unknown or repeated key, a value that is
    not a whole number, or sizes that no graph has.
    """
    known = [item.name for item in fields(Spec)]
    values: dict[str, int] = {}
    for part in name.removeprefix(PREFIX).split(","):
        key, _, text = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise MgraphError(f"{name!r} has the unknown key {key!r}; {_HELP}")
        if not text.isdecimal():
            raise MgraphError(f"{name!r} has {key}={text}, which is not a whole number; {_HELP}")
        if key in values:
            raise MgraphError(f"{name!r} gives {key} twice; {_HELP}")
        values[key] = int(text)
    for key in ("nodes", "edges"):
        if key not in values:
            raise MgraphError(f"{name!r} does not say {key}; {_HELP}")
    spec = Spec(**values)
    if not 1 <= spec.nodes <= MAX_NODES:
        raise MgraphError(f"{name!r} asks for {spec.nodes} nodes; ask for 1 to {MAX_NODES}")
    if not 1 <= spec.classes <= spec.nodes:
        raise MgraphError(f"{name!r} asks for {spec.classes} classes; ask for 1 to as many as there are nodes")
    most = spec.nodes * (spec.nodes - 1) // 4
    if spec.edges > most:
        raise MgraphError(f"{name!r} asks for {spec.edges} edges; at most {most}, half of all pairs, can be drawn")
    return spec


def generate(spec: Spec) -> RawGraph:
    """The graph of ``spec``: exactly its nodes, edges, features and classes; a pure function of the spec."""
    rng = np.random.default_rng(spec.seed)
    labels, community = _communities(spec, rng)
    tails, heads = _edges(spec, community, rng)
    features = _gaussian(labels, spec, rng) if spec.features else None
    return RawGraph(spec.name, spec.nodes, tails, heads, labels, features, None)


def _communities(spec: Spec, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Labels and communities, both [V]; a community lies within one class, and no class is empty."""
    count = min(max(spec.classes, spec.nodes // _COMMUNITY_NODES), spec.nodes)
    community = rng.integers(0, count, spec.nodes, dtype=np.int32)
    community[rng.choice(spec.nodes, count, replace=False)] = np.arange(count, dtype=np.int32)
    return (community % spec.classes).astype(np.int64), community


def _edges(
    spec: Spec, community: NDArray[np.int32], rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Exactly ``spec.edges`` distinct pairs: draw, drop repeats, draw what is missing, drop what is too much."""
    keys = np.empty(0, dtype=np.int64)
    if spec.edges:
        # Nodes in the order of their communities, so that a community is a slice of the weights' running sum.
        order = np.argsort(community, kind="stable").astype(np.int32)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(community))]).astype(np.int64)
        running = np.concatenate([[0.0], np.cumsum(_power_law_weights(spec, rng))])
        guide = _guide_table(running)
    attempt = 0
    while keys.size < spec.edges:
        missing = spec.edges - keys.size
        seed = np.uint64(rng.integers(0, 2**63))
        tries = missing + missing // 50 + 64
        if attempt < _ROUNDS_BY_WEIGHT:
            drawn = _draw_by_weight(tries, order, community, bounds, running, guide, seed)
        else:
            drawn = _draw_uniformly(2 * tries, spec.nodes, seed)
        keys = np.concatenate([keys, drawn])
        del drawn
        keys.sort()
        keys = keys[_first_of_each(keys)]
        attempt += 1
    surplus = rng.choice(keys.size, keys.size - spec.edges, replace=False, shuffle=False)
    keys = np.delete(keys, surplus)
    return (keys // spec.nodes).astype(np.int32), (keys % spec.nodes).astype(np.int32)


def _first_of_each(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the first of each run of equal sorted keys; -1 marks a draw that hit one node twice."""
    first = np.empty(keys.size, dtype=np.bool_)
    first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first & (keys >= 0)


def _power_law_weights(spec: Spec, rng: np.random.Generator) -> NDArray[np.float64]:
    """Expected-degree weights with tail exponent 2.5, cut where a hub would get more than 4 % of all nodes."""
    weights = (1.0 - rng.random(spec.nodes)) ** (-1.0 / (_EXPONENT - 1.0))
    ceiling = max(2.0, 0.04 * spec.nodes) * weights.mean() / max(1.0, 2.0 * spec.edges / spec.nodes)
    return np.minimum(weights, max(ceiling, 1.0))


def _guide_table(running: NDArray[np.float64]) -> NDArray[np.int32]:
    """For each of V equal steps of the total weight the slot it falls in: a lookup instead of a binary search."""
    steps = np.linspace(0.0, running[-1], running.size - 1, endpoint=False)
    return np.maximum(np.searchsorted(running, steps, side="right") - 1, 0).astype(np.int32)


@njit(nogil=True, cache=True)
def _uniform(seed: Any, counter: int) -> Any:
    """Uniform in [0, 1) as a pure function of (seed, counter): splitmix64."""
    state = seed + np.uint64(counter) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return float(state >> np.uint64(11)) / 9007199254740992.0


@njit(nogil=True, cache=True)
def _slot(running: NDArray[np.float64], guide: NDArray[np.int32], value: float) -> Any:
    """The slot whose part of the running sum holds ``value``."""
    last = running.size - 2
    slot = guide[min(int(value / running[-1] * guide.size), guide.size - 1)]
    while slot < last and running[slot + 1] <= value:
        slot += 1
    while slot > 0 and running[slot] > value:
        slot -= 1
    return slot


@njit(nogil=True, cache=True)
def _draw_by_weight(
    count: int,
    order: NDArray[np.int32],
    community: NDArray[np.int32],
    bounds: NDArray[np.int64],
    running: NDArray[np.float64],
    guide: NDArray[np.int32],
    seed: Any,
) -> Any:
    """Keys ``min * V + max`` of drawn pairs, -1 where both ends are one node."""
    num_nodes = order.size
    keys = np.empty(count, np.int64)
    for index in range(count):
        tail = order[_slot(running, guide, _uniform(seed, 3 * index) * running[-1])]
        low, high = 0.0, running[-1]
        if _uniform(seed, 3 * index + 1) < _INSIDE:
            home = community[tail]
            low, high = running[bounds[home]], running[bounds[home + 1]]
        head = order[_slot(running, guide, low + _uniform(seed, 3 * index + 2) * (high - low))]
        keys[index] = -1 if tail == head else min(tail, head) * np.int64(num_nodes) + max(tail, head)
    return keys


@njit(nogil=True, cache=True)
def _draw_uniformly(count: int, num_nodes: int, seed: Any) -> Any:
    keys = np.empty(count, np.int64)
    for index in range(count):
        tail = int(_uniform(seed, 2 * index) * num_nodes)
        head = int(_uniform(seed, 2 * index + 1) * num_nodes)
        keys[index] = -1 if tail == head else min(tail, head) * num_nodes + max(tail, head)
    return keys


def _gaussian(labels: NDArray[np.int64], spec: Spec, rng: np.random.Generator) -> NDArray[np.float32]:
    """Unit noise around class centres of standard deviation 2/sqrt(F): the classes overlap at every F."""
    scale = np.float32(2.0 / np.sqrt(spec.features))
    centres = rng.standard_normal((spec.classes, spec.features), dtype=np.float32) * scale
    features = rng.standard_normal((spec.nodes, spec.features), dtype=np.float32)
    step = max(1, (1 << 24) // spec.features)
    for first in range(0, spec.nodes, step):
        features[first : first + step] += centres[labels[first : first + step]]
    return features


_DEMO = Spec(nodes=4000, edges=16000, classes=5, seed=7)
_DEMO_WORDS = 100
_DEMO_WORD_RATE = 0.06
_DEMO_OWN_RATE = 0.12


def generate_demo() -> RawGraph:
    """The demo: 4,000 nodes in five communities of power-law degrees, all labelled, with binary word features.

    A class uses its own twenty words twice as often as the others, about seven words a node in all: the
    features alone say little, those of a few neighbours together say much.
    """
    rng = np.random.default_rng(_DEMO.seed)
    labels = rng.integers(0, _DEMO.classes, _DEMO.nodes)
    tails, heads = _edges(_DEMO, labels.astype(np.int32), rng)
    rates = np.full((_DEMO.classes, _DEMO_WORDS), _DEMO_WORD_RATE)
    for label in range(_DEMO.classes):
        rates[label, label :: _DEMO.classes] = _DEMO_OWN_RATE
    words = rng.random((_DEMO.nodes, _DEMO_WORDS)) < rates[labels]
    features = sparse.csr_matrix(words.astype(np.float32))
    return RawGraph("demo", _DEMO.nodes, tails, heads, labels, features, None)
