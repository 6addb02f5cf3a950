"""What is said of a long piece of work, by a clock of its own."""

from __future__ import annotations

from megagraph_cli.graph.progress import Pace


def test_share_rate_and_time_left_every_few_seconds() -> None:
    now, said = 0.0, []
    pace = Pace(said.append, "reading edge.csv.gz", 1000, "rows", clock=lambda: now)
    for done in range(0, 1001, 100):
        pace.at(done)
        now += 1.0
    assert said == [
        "reading edge.csv.gz: 20%, 100 rows/s, 0:08 left",
        "reading edge.csv.gz: 40%, 100 rows/s, 0:06 left",
        "reading edge.csv.gz: 60%, 100 rows/s, 0:04 left",
        "reading edge.csv.gz: 80%, 100 rows/s, 0:02 left",
    ]


def test_rates_are_short_and_short_work_says_nothing() -> None:
    now, said = 0.0, []
    pace = Pace(said.append, "writing x.npy", 8e9, "B", clock=lambda: now)
    now = 1.9
    pace.at(4e9)
    assert said == []
    now = 2.5
    pace.at(5e9)
    assert said == ["writing x.npy: 62%, 2 GB/s, 0:02 left"]
