"""Generated graphs: ``synthetic:...`` of any size, and the packaged ``demo``.

Power-law degrees (Chung-Lu weights) over communities: both ends of an edge are drawn by weight, the second one
within the first one's community most of the time. Features are Gaussian around one centre per class.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.raw import MAX_NODES, RawGraph
from megagraph_cli.graph.readers.rows import Rows, block_rows

PREFIX = "synthetic:"
_HELP = "write synthetic:nodes=1000,edges=5000,features=16,classes=4,seed=0"
_COMMUNITY_NODES = 400


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
    from megagraph_cli.graph.synthetic_edges import draw_edges

    rng = np.random.default_rng(spec.seed)
    labels, community = _communities(spec, rng)
    tails, heads = draw_edges(spec.edges, community, rng)
    features = None
    if spec.features:
        shape = (spec.nodes, spec.features)
        features = Rows(shape, np.dtype(np.float32), lambda _scratch: _gaussian(labels, spec, deepcopy(rng)))
    return RawGraph(spec.name, spec.nodes, tails, heads, labels, features, None)


def _communities(spec: Spec, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Labels and communities, both [V]; a community lies within one class, and no class is empty."""
    count = min(max(spec.classes, spec.nodes // _COMMUNITY_NODES), spec.nodes)
    community = rng.integers(0, count, spec.nodes, dtype=np.int32)
    community[rng.choice(spec.nodes, count, replace=False)] = np.arange(count, dtype=np.int32)
    return (community % spec.classes).astype(np.int64), community


def _gaussian(labels: NDArray[np.int64], spec: Spec, rng: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Unit noise around class centres of standard deviation 2/sqrt(F): the classes overlap at every F."""
    scale = np.float32(2.0 / np.sqrt(spec.features))
    centres = rng.standard_normal((spec.classes, spec.features), dtype=np.float32) * scale
    step = block_rows(spec.features)
    for first in range(0, spec.nodes, step):
        own = labels[first : first + step]
        block = rng.standard_normal((own.size, spec.features), dtype=np.float32)
        block += centres[own]
        yield block


_DEMO = Spec(nodes=4000, edges=16000, classes=5, seed=7)
_DEMO_WORDS = 100
_DEMO_WORD_RATE = 0.06
_DEMO_OWN_RATE = 0.12


def generate_demo() -> RawGraph:
    """The demo: 4,000 nodes in five communities of power-law degrees, all labelled, with binary word features.

    A class uses its own twenty words twice as often as the others, about seven words a node in all: the
    features alone say little, those of a few neighbours together say much.
    """
    from megagraph_cli.graph.synthetic_edges import draw_edges

    rng = np.random.default_rng(_DEMO.seed)
    labels = rng.integers(0, _DEMO.classes, _DEMO.nodes)
    tails, heads = draw_edges(_DEMO.edges, labels.astype(np.int32), rng)
    rates = np.full((_DEMO.classes, _DEMO_WORDS), _DEMO_WORD_RATE)
    for label in range(_DEMO.classes):
        rates[label, label :: _DEMO.classes] = _DEMO_OWN_RATE
    words = rng.random((_DEMO.nodes, _DEMO_WORDS)) < rates[labels]
    features = sparse.csr_matrix(words.astype(np.float32))
    return RawGraph("demo", _DEMO.nodes, tails, heads, labels, features, None)
