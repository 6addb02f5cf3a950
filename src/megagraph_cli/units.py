"""Byte sizes and durations as people write and read them. Inside the code: bytes and seconds only."""

from __future__ import annotations

import math
import re

from megagraph_cli.errors import MgraphError

MIB = 1024**2

_UNITS = {
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str, flag: str = "--mem") -> int:
    """Bytes of a size such as ``24GB`` (powers of 1000) or ``187MiB`` (powers of 1024).

    Raises MgraphError (exit 2) on a bare number, an unknown unit, or a size that is not positive.
    """
    match = _SIZE.match(text)
    if match is None:
        raise MgraphError(f"{flag} {text!r} is not a size; write a number with a unit, such as {flag} 24GB")
    number, unit = match.groups()
    if not unit and float(number) != 0:
        raise MgraphError(f"{flag} {text} has no unit; write {flag} {number}GB or {flag} {number}GiB")
    if unit and unit.upper() not in _UNITS:
        raise MgraphError(f"{flag} {text} has an unknown unit {unit!r}; use KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = math.floor(float(number) * _UNITS[unit.upper() or "B"])
    if size <= 0:
        raise MgraphError(f"{flag} {text} leaves no memory at all; give a size above zero, such as {flag} 24GB")
    return size


def format_bytes(size: float) -> str:
    """A size for people, in powers of 1000: ``1.53 GB``."""
    for unit, scale in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def ceil_mib(size_bytes: int) -> int:
    """Whole MiB that hold ``size_bytes``, rounded up."""
    return -(-size_bytes // MIB)


def format_seconds(seconds: float) -> str:
    """A duration for people: ``3.2 ms``, ``41.0 s``, ``2 m 05 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {rest:02d} s"
