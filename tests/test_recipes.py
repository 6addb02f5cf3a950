"""Recipes by name and file, ``--set``, and the one sentence for each way to get them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli import recipes
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError
from tests.artifacts import examples

SHIPPED = [
    "arxiv",
    "citeseer",
    "computers",
    "cora",
    "default",
    "demo",
    "photo",
    "products",
    "pubmed",
    "reddit",
    "reddit2",
]
LARGE = ("arxiv", "products", "reddit", "reddit2")


def fails(dataset: str | None, recipe: str | None, *sets: str) -> str:
    with pytest.raises(MgraphError) as caught:
        recipes.resolve(dataset, recipe, sets)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_recipes_that_ship() -> None:
    assert recipes.recipe_names() == SHIPPED


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "default"])
def test_each_is_for_the_dataset_of_its_name_and_says_every_key(name: str) -> None:
    recipe = recipes.resolve(name, None, [])
    assert recipe.dataset.name == name
    assert recipe == recipes.resolve(None, name, [])
    if name in LARGE:  # the paper's setting
        assert (recipe.model.num_layers, recipe.model.num_heads, recipe.model.hidden_dim) == (16, 8, 64)
        assert (recipe.model.ffn_dim, recipe.batch.batch_size) == (64, 8192)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_recipe_leaves_a_key_to_the_defaults(name: str) -> None:
    import tomllib

    tables = tomllib.loads((recipes.recipe_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    said = {f"{section}.{key}" for section, keys in tables.items() for key in keys}
    known = {f"{section}.{key}" for section, keys in examples.workload().recipe().model_dump().items() for key in keys}
    assert known - said == ({"dataset.name"} if name == "default" else set())


def test_a_dataset_without_a_recipe_of_its_own_gets_the_default() -> None:
    recipe = recipes.resolve("synthetic:nodes=10,edges=20", None, [])
    default = recipes.resolve("demo", "default", [])
    assert recipe.dataset.name == "synthetic:nodes=10,edges=20"
    assert (recipe.model, recipe.batch, recipe.train) == (default.model, default.batch, default.train)


def test_a_dataset_beside_a_recipe_replaces_its_own() -> None:
    recipe = recipes.resolve("photo", "products", [])
    assert (recipe.dataset.name, recipe.model.num_layers) == ("photo", 16)


def test_a_users_graph_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.resolve("own/graph.npz", None, []).dataset.name == str(tmp_path.resolve() / "own" / "graph.npz")
    assert recipes.resolve("x.pt", None, []).dataset.name == str(tmp_path.resolve() / "x.pt")
    assert recipes.resolve(None, "cora", ["dataset.name=x.npz"]).dataset.name == str(tmp_path.resolve() / "x.npz")


@pytest.mark.parametrize(
    ("name", "named"),
    [("odd\udcff.npz", r"odd\\udcff\.npz' is not UTF-8"), ("x" * 300 + ".pt", "too long"), ("/x" * 2500, "too long")],
)
def test_a_name_that_no_artifact_or_file_system_can_hold_is_itself_blamed(name: str, named: str) -> None:
    with pytest.raises(MgraphError, match=named) as caught:
        recipes.resolve(name, None, [])
    assert caught.value.exit_code == EXIT_USAGE
    assert "default.toml" not in caught.value.message


def test_a_users_recipe_may_leave_keys_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[dataset]\nname = "cora"\n[model]\nnum_layers = 3\n', encoding="utf-8")
    recipe = recipes.resolve(None, str(path), [])
    assert (recipe.dataset.name, recipe.model.num_layers, recipe.model.hidden_dim) == ("cora", 3, 64)


def test_set_takes_toml_values_and_bare_words_and_the_last_wins() -> None:
    sets = [
        "model.num_layers=2",
        "model.num_layers = 16",
        "train.lr=1e-2",
        "train.weight_decay=0",
        "train.dtype=float64",
        'dataset.split="public:0"',
        "dataset.metric=roc_auc",
    ]
    recipe = recipes.resolve("cora", None, sets)
    assert (recipe.model.num_layers, recipe.train.lr, recipe.train.weight_decay) == (16, 0.01, 0.0)
    assert (recipe.train.dtype, recipe.dataset.split, recipe.dataset.metric) == ("float64", "public:0", "roc_auc")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model.num_layers", "section.key=value"),
        ("=3", "section.key=value"),
        ("num_layers=3", "section.key=value"),
        ("model.a.b=3", "section.key=value"),
        ("modle.num_layers=3", "did you mean model?"),
        ("model.num_layer=3", "did you mean num_layers?"),
        ("plan.pp=3", "no section 'plan'"),
        ("model.num_layers=many", "--set model.num_layers: input should be a valid integer (got 'many')"),
        ("model.num_layers=2.5", "--set model.num_layers"),
        ("model.num_layers=0", "--set model.num_layers"),
        ("train.lr=nan", "--set train.lr"),
        ("train.lr=", "--set train.lr"),
        ("train.dtype=float16", "'float32', 'float64' or 'bfloat16'"),
        ("model.num_heads=7", "does not divide hidden_dim = "),
        ("dataset.split=half", "random:0.6,0.2,0.2"),
        ("dataset.name=", "--set dataset.name"),
    ],
)
def test_a_set_that_cannot_be_names_the_flag(text: str, named: str) -> None:
    message = fails("cora", None, text)
    assert named in message
    assert "--set" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[dataset\n", "is not TOML"),
        ('[dataset]\nname = "x"\n[modle]\nnum_layers = 3\n', "did you mean model?"),
        ('[dataset]\nname = "x"\n[model]\nlayers = 3\n', "model.layers is no known key; did you mean num_layers?"),
        ('[dataset]\nname = "x"\n[model]\nnum_layers = "3"\n', "model.num_layers: input should be a valid integer"),
        ('[dataset]\nname = "x"\n[model]\nnum_heads = 5\n', "num_heads = 5 does not divide hidden_dim = "),
        ('model = 3\n[dataset]\nname = "x"\n', "model is not a table"),
        ("[model]\nnum_layers = 3\n", "--dataset NAME"),
        ('[dataset]\nsplit = "auto"\n', "--dataset NAME"),
    ],
)
def test_a_malformed_file_is_named_with_its_key_and_the_way_out(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    message = fails(None, str(path))
    assert named in message
    assert str(path) in message


def test_unknown_and_unreadable_recipes(tmp_path: Path) -> None:
    assert "did you mean cora?" in fails(None, "coraa")
    assert "citeseer" in fails(None, "zzz")
    assert "there is no recipe file" in fails(None, str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in fails(None, str(tmp_path / "bytes.toml"))
    assert "--dataset" in fails(None, None)
    assert "--dataset" in fails(None, "default")


@given(st.text())
def test_no_text_breaks_set(text: str) -> None:
    try:
        recipes.parse_sets([f"dataset.name={text}"])
        recipes.parse_sets([text])
    except MgraphError as error:
        assert error.exit_code == EXIT_USAGE  # noqa: PT017 (either outcome is right; only another error is not)


def test_a_later_command_that_is_told_otherwise_exits_4() -> None:
    workload, path = examples.workload(), Path("plan.json")
    recipes.check_matches(workload, path, dataset="demo", recipe=None, sets=["model.num_layers=4"])
    for told, key in (
        ({"dataset": "cora", "recipe": None, "sets": []}, "dataset.name"),
        ({"dataset": None, "recipe": "products", "sets": []}, "dataset.name"),
        ({"dataset": "demo", "recipe": "products", "sets": []}, "model.num_layers"),
        ({"dataset": None, "recipe": None, "sets": ["train.lr=0.5"]}, "train.lr"),
    ):
        with pytest.raises(MgraphError, match=key) as caught:
            recipes.check_matches(workload, path, **told)
        assert caught.value.exit_code == EXIT_STALE


@pytest.mark.parametrize("dataset", ["citeseer", "demo", "synthetic:nodes=10,edges=20"])
def test_sets_for_names_what_differs_and_nothing_else(dataset: str) -> None:
    sets = ["model.embedding=both", "train.lr=0.025", "train.dtype=float64", "dataset.split=random:0.5,0.25,0.25"]
    changed = recipes.resolve(dataset, None, sets)
    assert recipes.resolve(dataset, None, recipes.sets_for(changed)) == changed
    assert set(recipes.sets_for(changed)) == set(sets)
    assert recipes.sets_for(recipes.resolve(dataset, None, [])) == ()
