"""The registry: a dataset is one reader and one registration.

Raw files lie under ``root/NAME/`` in the layout of the dataset's usual readers and are used as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph import synthetic
from megagraph_cli.graph.progress import Report
from megagraph_cli.graph.readers import npz, ogb, planetoid, pyg, saint
from megagraph_cli.graph.readers.download import Remote
from megagraph_cli.graph.readers.raw import RawGraph


@dataclass(frozen=True)
class Dataset:
    """How one graph is read: ``files`` relative to its folder, ``read`` given that folder and whom to report to,
    ``remotes`` where missing files can be had. A generated graph has no files. ``otherwise`` is the same graph in
    another layout, taken where its files are there and these are not."""

    name: str
    files: tuple[str, ...]
    read: Callable[[Path, Report], RawGraph]
    licence: str
    source: str
    remotes: tuple[Remote, ...] = ()
    revision: int = 1
    """To be raised when the same files come to mean another graph, so that older stores are not taken for it."""
    otherwise: Dataset | None = None

    def lies_in(self, folder: Path) -> bool:
        """Whether all of its files are there."""
        return all((folder / file).is_file() for file in self.files)


def _silently(read: Callable[[Path], RawGraph]) -> Callable[[Path, Report], RawGraph]:
    """A reader that has nothing to report on the way."""
    return lambda folder, _report: read(folder)


REGISTRY: dict[str, Dataset] = {}

USER_READERS: dict[str, Callable[[Path], RawGraph]] = {".npz": npz.read_npz, ".pt": pyg.read_pt}
"""Readers of a user's own file by its suffix."""

_GENERATED = "generated, free of any licence"


def register(dataset: Dataset) -> None:
    """Makes a dataset known under its name."""
    assert dataset.name not in REGISTRY, dataset.name
    REGISTRY[dataset.name] = dataset


def resolve(name: str, root: Path) -> tuple[Dataset, Path]:
    """The dataset called ``name`` and the folder of its files: a registered name, ``synthetic:...`` or a file.

    Raises MgraphError (exit 2) on an unknown name, naming the known ones and the nearest.
    """
    if name.startswith(synthetic.PREFIX):
        spec = synthetic.parse_spec(name)
        generated = Dataset(
            spec.name, (), lambda _folder, _report: synthetic.generate(spec), _GENERATED, "mgraph synthetic"
        )
        return generated, root
    if name in REGISTRY:
        dataset, folder = REGISTRY[name], root / name
        other = dataset.otherwise
        taken = other if other is not None and other.lies_in(folder) and not dataset.lies_in(folder) else dataset
        return taken, folder
    path = Path(name).expanduser()
    if path.suffix in USER_READERS:
        return _user_file(name, path)
    if path.is_file():
        raise MgraphError(f"{name} is not a graph file; give a .npz or a .pt file")
    near = difflib.get_close_matches(name.lower(), REGISTRY, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise MgraphError(
        f"dataset {name!r} is not known{hint}; known are {', '.join(REGISTRY)}, synthetic:nodes=..,edges=.. and "
        "paths to .npz or .pt files"
    )


def _user_file(name: str, path: Path) -> tuple[Dataset, Path]:
    if not path.is_file():
        raise MgraphError(f"{name} does not exist or is no file; check the path")
    resolved = path.resolve()
    read = USER_READERS[path.suffix]
    licence = "not stated: the user's own file"
    dataset = Dataset(
        name,
        (resolved.name,),
        lambda folder, _report: read(folder / resolved.name),
        licence,
        str(resolved),
        revision=2,
    )
    return dataset, resolved.parent


def _register_planetoid(name: str) -> None:
    files = tuple(f"raw/ind.{name}.{part}" for part in planetoid.PARTS)
    base = "https://github.com/kimiyoung/planetoid/raw/master/data"
    register(
        Dataset(
            name,
            files,
            lambda folder, _report: planetoid.read_planetoid(folder / "raw", name),
            "MIT (kimiyoung/planetoid); the original collections state none",
            "https://github.com/kimiyoung/planetoid",
            tuple(Remote(f"{base}/{Path(file).name}", (("", file),)) for file in files),
        )
    )


def _register_amazon(name: str) -> None:
    file = f"raw/amazon_electronics_{name}.npz"
    register(
        Dataset(
            name,
            (file,),
            lambda folder, _report: npz.read_npz(folder / file),
            "MIT (shchur/gnn-benchmark)",
            "https://github.com/shchur/gnn-benchmark",
            (Remote(f"https://github.com/shchur/gnn-benchmark/raw/master/data/npz/{Path(file).name}", (("", file),)),),
        )
    )


def _register_ogb(name: str, split: str, licence: str) -> None:
    files = ogb.files(split)
    members = tuple((f"{name}/{file}", file) for file in files)
    source = f"https://ogb.stanford.edu/docs/nodeprop/#ogbn-{name}"
    register(
        Dataset(
            name,
            files,
            partial(ogb.read_ogb, split=split),
            licence,
            source,
            (Remote(f"http://snap.stanford.edu/ogb/data/nodeproppred/{name}.zip", members),),
            otherwise=Dataset(name, ogb.binary_files(split), partial(ogb.read_binary, split=split), licence, source),
        )
    )


register(Dataset("demo", (), lambda _folder, _report: synthetic.generate_demo(), _GENERATED, "mgraph demo"))
for _name in ("citeseer", "cora", "pubmed"):
    _register_planetoid(_name)
for _name in ("computers", "photo"):
    _register_amazon(_name)
register(
    Dataset(
        "reddit",
        saint.REDDIT_FILES,
        _silently(saint.read_reddit),
        "not stated (GraphSAGE, Hamilton et al. 2017)",
        "http://snap.stanford.edu/graphsage/",
        (
            Remote(
                "https://data.dgl.ai/dataset/reddit.zip",
                tuple((Path(file).name, file) for file in saint.REDDIT_FILES),
            ),
        ),
    )
)
register(
    Dataset(
        "reddit2",
        saint.SAINT_FILES,
        _silently(saint.read_saint),
        "not stated (GraphSAINT, Zeng et al. 2020)",
        "https://github.com/GraphSAINT/GraphSAINT",
        tuple(
            Remote(f"https://drive.usercontent.google.com/download?id={key}&confirm=t", (("", file),))
            for file, key in zip(saint.SAINT_FILES, saint.SAINT_DRIVE_IDS, strict=True)
        ),
    )
)
_register_ogb("arxiv", "time", "ODC-BY")
_register_ogb("products", "sales_ranking", "Amazon licence (see ogb.stanford.edu)")
