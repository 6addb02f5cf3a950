"""Initial weights: from the name alone, the same in every stage, with the stated spreads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megagraph_cli.model.attention import LocalAttend
from megagraph_cli.model.init import initialise, parameter_seed
from megagraph_cli.model.transformer import Stage
from tests.model.small import layer_shape, model_shape

SHAPE = model_shape(
    layer=layer_shape(hidden_dim=48, ffn_dim=40, num_heads=4, bias_powers=6),
    num_features=60,
    table_rows=90,
    num_global=20,
)
BIAS_STD = 0.7


def values(layers: range, rng_seed: int = 0) -> dict[str, Tensor]:
    stage = Stage(SHAPE, layers, LocalAttend(), first=layers.start == 0, last=layers.stop == 5)
    initialise(stage, rng_seed, BIAS_STD)
    return {name: parameter.detach() for name, parameter in stage.named_parameters()}


def expected_std(name: str) -> float | None:
    if name in ("embedding.table", "embedding.tokens", "token_bias"):
        return 0.02
    if name.endswith("bias_weight"):
        return BIAS_STD
    linear = ("qkv.weight", "out.weight", "up.weight", "down.weight", "linear.weight", "embedding.weight")
    return 0.02 / math.sqrt(SHAPE.num_layers) if name.endswith(linear) else None


def test_values_are_the_same_whichever_stage_holds_the_parameter() -> None:
    whole = values(range(5))
    for layers in (range(1), range(1, 4), range(4, 5)):
        for name, value in values(layers).items():
            assert torch.equal(value, whole[name]), name


def test_every_name_and_every_seed_has_numbers_of_its_own() -> None:
    drawn = {name: value.flatten() for name, value in values(range(5)).items() if expected_std(name) is not None}
    firsts = [round(float(value[0]) / (expected_std(name) or 1), 6) for name, value in drawn.items()]
    assert len(set(firsts)) == len(firsts)
    assert not torch.equal(drawn["layers.0.up.weight"], drawn["layers.1.up.weight"])
    again = values(range(5), rng_seed=1)
    for name, value in drawn.items():
        assert not torch.equal(value, again[name].flatten()), name
    assert 0 <= parameter_seed(0, "a") < 2**63
    assert parameter_seed(1, "1/a") != parameter_seed(11, "/a")


def test_drawing_leaves_torchs_own_generator_alone() -> None:
    stage = Stage(SHAPE, range(5), LocalAttend(), first=True, last=True)
    before = torch.get_rng_state()
    initialise(stage, 0, BIAS_STD)
    assert torch.equal(before, torch.get_rng_state())


def test_spreads_are_the_stated_ones() -> None:
    """A sample standard deviation of n normal numbers is within std / sqrt(2 n); five of these are 6e-7 of chance."""
    for name, value in values(range(5)).items():
        std = expected_std(name)
        if std is None:
            constant = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert bool((value == constant).all()), name
            continue
        n = value.numel()
        assert abs(float(value.std()) / std - 1) <= 5 / math.sqrt(2 * n), name
        assert abs(float(value.mean())) <= 5 * std / math.sqrt(n), name
