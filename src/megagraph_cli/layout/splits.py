"""The grammar of ``dataset.split``: ``auto``, ``public:K`` or ``random:a,b,c``."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True)
class SplitRule:
    """A split in words: ``index`` of a public mask, or the exact ``fractions`` of a random cut."""

    kind: Literal["auto", "public", "random"]
    index: int = 0
    fractions: tuple[Fraction, ...] = ()


DEFAULT_RANDOM = SplitRule("random", fractions=(Fraction(6, 10), Fraction(2, 10), Fraction(2, 10)))


def parse_split(text: str) -> SplitRule:
    """The rule a text stands for. Raises ValueError with a sentence that names the text and the way out."""
    kind, _, argument = text.partition(":")
    if text == "auto":
        return SplitRule("auto")
    if kind == "public":
        if not argument.isdecimal():
            raise _no_split(text, "it does not name a mask by number")
        return SplitRule("public", index=int(argument))
    if kind == "random":
        return SplitRule("random", fractions=_fractions(text, argument))
    raise _no_split(text, "its kind is not known")


def _fractions(text: str, argument: str) -> tuple[Fraction, ...]:
    """Exact fractions: floor(0.6 n) must not depend on how a sum of floats rounds."""
    try:
        fractions = tuple(Fraction(part.strip()) for part in argument.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise _no_split(text, "it has a part that is not a number") from error
    if len(fractions) != 3:
        raise _no_split(text, f"it has {len(fractions)} parts instead of train, val and test")
    if fractions[0] <= 0 or min(fractions) < 0 or sum(fractions) > 1:
        raise _no_split(text, "it needs a share above 0 for training and shares that add up to at most 1")
    return fractions


def _no_split(text: str, why: str) -> ValueError:
    return ValueError(f"{text!r} is no split: {why}; write auto, public:0 or random:0.6,0.2,0.2")
