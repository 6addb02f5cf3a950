"""The workload: the resolved recipe (dataset, model, batch, train) and what is known of its prepared graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megagraph_cli.artifacts.base import Part
from megagraph_cli.layout.parameters import ParameterCounts, count_parameters
from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.layout.splits import parse_split

MAX_ROWS = 2**15 - 1
"""Rows of a sequence: places within one are 16-bit numbers."""

MAX_SEED = 2**63 - 1
"""Seeds are keys of the sampler's streams, which are 64-bit numbers."""
MAX_BATCH_SIZE = 2**31 - 1
"""Targets of a batch, padding included, are at most as many as nodes can be."""


class DatasetSection(Part):
    """``[dataset]``: which graph, which split, which metric."""

    name: str = Field(min_length=1)
    split: str = "auto"
    split_seed: int = Field(default=42, ge=0, le=MAX_SEED)
    metric: Literal["accuracy", "roc_auc"] = "accuracy"
    feature_dtype: Literal["float32", "float16"] = "float32"
    """What features are kept as; the model computes in ``train.dtype``."""

    @field_validator("split")
    @classmethod
    def _known_split(cls, value: str) -> str:
        parse_split(value)
        return value


class ModelSection(Part):
    """``[model]``: the graph transformer of paper.md."""

    num_layers: int = Field(default=4, ge=1, le=10_000)
    num_heads: int = Field(default=8, ge=1)
    hidden_dim: int = Field(default=64, ge=1)
    ffn_dim: int = Field(default=64, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    input_dropout: float = Field(default=0.1, ge=0, lt=1)
    embedding: Literal["auto", "features", "table", "both"] = "auto"
    bias_powers: int = Field(default=6, ge=1, le=32)
    bias_scale: float = Field(default=1.0, gt=0)
    bias_init_std: float = Field(default=0.02, ge=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSection:
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} does not divide hidden_dim = {self.hidden_dim}; "
                "choose a hidden_dim that is a multiple of num_heads"
            )
        return self


class BatchSection(Part):
    """``[batch]``: targets per optimizer step and the shape of a sequence."""

    batch_size: int = Field(default=1024, ge=1, le=MAX_BATCH_SIZE)
    num_sampled: int = Field(default=15, ge=1)
    num_super: int = Field(default=1, ge=0)
    num_global: int = Field(default=1, ge=0)
    eval_views: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _countable(self) -> BatchSection:
        if self.num_sampled + self.num_super + self.num_global > MAX_ROWS:
            raise ValueError(f"a sequence of more than {MAX_ROWS} rows cannot be built; lower num_sampled or num_super")
        return self

    def rows(self, cp: int = 1) -> RowLayout:
        """The row layout of these sequences over ``cp`` ranks."""
        return RowLayout(self.num_sampled, self.num_super, self.num_global, cp)


class TrainSection(Part):
    """``[train]``: optimization and numerics."""

    epochs: int = Field(default=10, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    end_lr: float = Field(default=1e-6, ge=0)
    warmup_epochs: float = Field(default=1.0, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    grad_clip: float = Field(default=5.0, ge=0)
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    matmul_precision: Literal["highest", "tf32"] = "highest"
    rng_seed: int = Field(default=0, ge=0, le=MAX_SEED)
    sampling_update_epochs: int = Field(default=0, ge=0)


class GraphInfo(Part):
    """What later commands need to know of the prepared graph without opening it."""

    digest: str
    nodes: int = Field(ge=1)
    edges: int = Field(ge=0)
    features: int = Field(ge=0)
    feature_density: float = Field(ge=0, le=1)
    classes: int = Field(ge=1)
    clusters: int = Field(ge=0)
    train: int = Field(ge=0)
    val: int = Field(ge=0)
    test: int = Field(ge=0)


class Recipe(Part):
    """A recipe as its TOML file gives it, defaults filled in."""

    dataset: DatasetSection
    model: ModelSection = ModelSection()
    batch: BatchSection = BatchSection()
    train: TrainSection = TrainSection()


class Workload(Recipe):
    """A resolved recipe and, once the graph was prepared, what is known of it."""

    graph: GraphInfo | None = None

    def recipe(self) -> Recipe:
        return Recipe(dataset=self.dataset, model=self.model, batch=self.batch, train=self.train)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one parameter (bfloat16 is autocast over float32 weights)."""
        return 8 if self.train.dtype == "float64" else 4

    def parameters(self) -> ParameterCounts:
        """Parameter counts of the model this workload trains; needs ``graph``."""
        graph = self.graph
        assert graph is not None, "parameter counts need the prepared graph"
        use_features, use_table = embedding_inputs(self.model.embedding, graph.features)
        return count_parameters(
            hidden_dim=self.model.hidden_dim,
            ffn_dim=self.model.ffn_dim,
            num_heads=self.model.num_heads,
            bias_powers=self.model.bias_powers,
            num_global=self.batch.num_global,
            num_classes=graph.classes,
            num_features=graph.features if use_features else 0,
            table_rows=graph.nodes + graph.clusters if use_table else 0,
        )


EVERY_KEY: dict[str, Sequence[str]] = {
    "dataset": tuple(DatasetSection.model_fields),
    "model": tuple(ModelSection.model_fields),
    "batch": tuple(BatchSection.model_fields),
    "train": tuple(TrainSection.model_fields),
}
DECIDING: dict[str, Sequence[str]] = EVERY_KEY | {"train": ("dtype", "matmul_precision")}
"""What a step's seconds and bytes depend on: the rest of ``train`` costs nothing."""


def first_difference(
    mine: Workload, theirs: Workload, keys: Mapping[str, Sequence[str]] = DECIDING
) -> tuple[str, Any, Any] | None:
    """(``section.key``, my value, theirs) of the first of ``keys`` in which two workloads differ, None where none does.

    Last the prepared graph's digest, shortened, where both know their graph: one name may be of another content.
    """
    for section, names in keys.items():
        for name in names:
            pair = getattr(getattr(mine, section), name), getattr(getattr(theirs, section), name)
            if pair[0] != pair[1]:
                return f"{section}.{name}", *pair
    if mine.graph and theirs.graph and mine.graph.digest != theirs.graph.digest:
        return "graph.digest", mine.graph.digest[:12], theirs.graph.digest[:12]
    return None


def embedding_inputs(embedding: str, num_features: int) -> tuple[bool, bool]:
    """(use features, use table) for a ``model.embedding`` setting; ``auto`` takes the table where there are none."""
    if embedding == "auto":
        embedding = "features" if num_features else "table"
    return embedding in ("features", "both"), embedding in ("table", "both")
