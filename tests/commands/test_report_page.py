"""The report in a real Chromium: what a reader sees of the search, with no network and no complaint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megagraph_cli.commands import fit, search
from megagraph_cli.commands.search import Searched, SearchRequest
from tests.browser import Browser, browser, missing
from tests.cost import planted

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

BOXES = """
const boxes = {};
for (const svg of document.querySelectorAll('svg')) {
  const outer = svg.getBoundingClientRect();
  boxes[svg.id] = [...svg.querySelectorAll('circle, rect, line, polyline, text')].map(each => {
    const box = each.getBoundingClientRect();
    return [each.tagName, each.getAttribute('class') || '', box.left - outer.left, box.top - outer.top,
            box.right - outer.left, box.bottom - outer.top, outer.width, outer.height];
  });
}
return boxes;
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A browser that has opened the report of a search over two stages, and what the search found."""
    folder = tmp_path_factory.mktemp("report")
    planted.profile(work=planted.workload(12, 1024)).save(folder / "profile.json")
    fit.run(folder / "profile.json", folder / "cost_model.json", force=False)
    request = replace(SearchRequest(folder / "cost_model.json", mem_bytes=280 * 10**6), pp=2)
    done = search.write(request, folder / "plan.json", report=folder / "report.html", trace=None)
    with browser(folder) as session:
        session.open(folder / "report.html")
        yield session, done, folder


def test_the_page_asks_for_itself_alone_and_says_nothing_in_the_console(shown: tuple[Browser, Searched, Path]) -> None:
    session, _, folder = shown
    assert session.console() == []
    assert session.requested() == [(folder / "report.html").resolve().as_uri()]


def test_a_reader_sees_the_plan_and_why_others_lost(shown: tuple[Browser, Searched, Path]) -> None:
    session, done, _ = shown
    words = session.script("return document.body.innerText")
    best = done.plan.pareto[0]
    assert f"pp={best.dims.pp} cp={best.dims.cp} dp={best.dims.dp}" in words
    assert str(done.plan.search and done.plan.search.num_feasible) in words
    losers = session.script("return [...document.querySelectorAll('table:last-of-type tr')].map(row => row.innerText)")
    assert len(losers) > 2
    assert all(len(row.split("\t")) > 1 and row.split("\t")[-1].strip() for row in losers)


def test_every_mark_is_drawn_inside_its_chart_and_none_is_without_size(shown: tuple[Browser, Searched, Path]) -> None:
    session, done, _ = shown
    boxes = session.script(BOXES)
    assert set(boxes) == {"pareto", "memory", "timeline"}
    for name, marks in boxes.items():
        assert marks, name
        for tag, kind, left, top, right, bottom, width, height in marks:
            where = f"{tag} {kind} of {name}"
            assert -1 <= left <= right <= width + 1, where
            assert -1 <= top <= bottom <= height + 1, where
            assert right > left or bottom > top, where
    circles = [mark for mark in boxes["pareto"] if mark[0] == "circle"]
    assert len(circles) == len(done.plan.pareto) + len(done.plan.runners_up)


def test_the_limit_lies_right_of_every_bar_that_fits(shown: tuple[Browser, Searched, Path]) -> None:
    session, _, _ = shown
    marks = session.script(BOXES)["memory"]
    limit = next(left for tag, kind, left, *_ in marks if (tag, kind) == ("line", "limit"))
    ends = [right for tag, kind, _, _, right, *_ in marks if (tag, kind) == ("rect", "bar")]
    assert 0 < max(ends) <= limit + 0.5


def test_the_timeline_begins_and_ends_where_the_step_does(shown: tuple[Browser, Searched, Path]) -> None:
    """Forward work of stage 1 begins no earlier than the first forward of stage 0 ends."""
    session, done, _ = shown
    marks = session.script(BOXES)["timeline"]
    forward = sorted((top, left, right) for tag, kind, left, top, right, *_ in marks if kind == "forward")
    rows = sorted({top for top, _, _ in forward})
    assert len(rows) == 2
    assert len(forward) == 2 * done.plan.num_microbatches
    first = min(right for top, _, right in forward if top == rows[0])
    assert min(left for top, left, _ in forward if top == rows[1]) >= first - 1


def test_the_chosen_plan_stands_out(shown: tuple[Browser, Searched, Path]) -> None:
    session, _, _ = shown
    seen = session.script(
        "const c = document.querySelector('circle.chosen'); return [getComputedStyle(c).fill, c.getAttribute('r')]"
    )
    others = session.script(
        "return [...document.querySelectorAll('circle:not(.chosen)')]"
        ".map(c => [getComputedStyle(c).fill, c.getAttribute('r')])"
    )
    assert others
    assert seen not in others
