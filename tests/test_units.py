"""Sizes and durations as people write and read them."""

from __future__ import annotations

import pytest

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.units import ceil_mib, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("187MiB", 187 * 2**20),
        ("1.5kb", 1500),
        ("0.5TiB", 2**39),
        ("3TB", 3 * 10**12),
        ("17B", 17),
    ],
)
def test_sizes_are_powers_of_1000_or_1024(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "named"),
    [("24", "no unit"), ("24XB", "'XB'"), ("", "not a size"), ("-3GB", "not a size"), ("0", "no memory")],
)
def test_a_size_that_is_none_says_what_to_write(text: str, named: str) -> None:
    with pytest.raises(MgraphError, match=named) as caught:
        parse_bytes(text)
    assert caught.value.exit_code == EXIT_USAGE
    assert "--mem" in caught.value.message


def test_mebibytes_are_rounded_up() -> None:
    assert [ceil_mib(size) for size in (0, 1, 2**20, 2**20 + 1)] == [0, 1, 1, 2]


def test_a_rounded_up_size_is_enough_when_read_back() -> None:
    for size in (1, 12_345_678, 2**33 - 1, 2**33 + 1):
        assert parse_bytes(f"{ceil_mib(size)}MiB") >= size


def test_sizes_and_durations_for_people() -> None:
    assert [format_bytes(size) for size in (17, 1530, 1_530_000_000)] == ["17 B", "1.53 KB", "1.53 GB"]
    assert [format_seconds(seconds) for seconds in (2e-5, 3.2e-3, 41.0, 125.0, 7260.0)] == [
        "20 us",
        "3.2 ms",
        "41.0 s",
        "2 m 05 s",
        "2 h 01 m",
    ]
