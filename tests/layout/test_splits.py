"""One grammar of splits for recipes and graphs."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megagraph_cli.layout.splits import DEFAULT_RANDOM, SplitRule, parse_split


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("auto", SplitRule("auto")),
        ("public:0", SplitRule("public", index=0)),
        ("public:9", SplitRule("public", index=9)),
        ("random:0.6,0.2,0.2", DEFAULT_RANDOM),
        ("random: 0.6, 0.2, 0.2", DEFAULT_RANDOM),
        ("random:1/3,1/3,1/3", SplitRule("random", fractions=(Fraction(1, 3),) * 3)),
        ("random:0.7,0.1,0.2", SplitRule("random", fractions=(Fraction(7, 10), Fraction(1, 10), Fraction(2, 10)))),
    ],
)
def test_rules_are_exact(text: str, rule: SplitRule) -> None:
    # 0.7 + 0.1 + 0.2 adds up to less than 1 in floats and to 1 in fractions.
    assert parse_split(text) == rule


@pytest.mark.parametrize(
    "text", ["", "auto:1", "public", "public:-1", "public:²", "random", "random:0.6,0.3,0.2", "x:1"]
)
def test_what_is_no_split_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no split") as caught:
        parse_split(text)
    assert repr(text) in str(caught.value)
