"""``--explain``, ``--compare``, ``--report`` and ``--trace``: what they say is what the search found."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.commands import explain, fit, report, search, tables
from megagraph_cli.commands.search import SearchRequest
from megagraph_cli.console import Screen
from megagraph_cli.cost.explain import WAITING
from megagraph_cli.errors import MgraphError
from megagraph_cli.layout.dims import factorisations
from tests.cost import planted

MB = 10**6


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> SearchRequest:
    folder = tmp_path_factory.mktemp("explain")
    planted.profile(work=planted.workload(12, 1024)).save(folder / "profile.json")
    fit.run(folder / "profile.json", folder / "cost_model.json", force=False)
    return SearchRequest(folder / "cost_model.json", mem_bytes=280 * MB)


def test_the_winner_won_and_every_other_lost_by_named_terms(request_: SearchRequest) -> None:
    best = search.find(request_).plan
    found = explain.explain(request_, f"pp={best.dims.pp},cp={best.dims.cp},dp={best.dims.dp}")
    assert (found.verdict, found.because) == ("won", [])
    lost = explain.explain(request_, "pp=4,cp=1,dp=1")
    assert lost.verdict == "lost"
    assert lost.chosen is not None
    assert lost.candidate.step_s > lost.chosen.step_s
    # The terms of either plan add up to its step, so what the sentences name is the whole difference or less.
    mine, theirs = lost.candidate.times_s, lost.chosen.times_s
    assert sum(mine.values()) - sum(theirs.values()) == pytest.approx(lost.candidate.step_s - lost.chosen.step_s)
    gaps = {name: mine[name] - theirs.get(name, 0.0) for name in mine}
    assert lost.because[0].startswith(max(gaps, key=lambda name: gaps[name]))


def test_a_candidate_that_does_not_fit_is_pruned_stage_by_stage(request_: SearchRequest) -> None:
    tight = replace(request_, mem_bytes=206 * MB)
    found = explain.explain(tight, "pp=1,cp=1,dp=4,microbatches=1,recompute=none")
    assert found.verdict == "pruned"
    assert found.over_bytes(0) == found.candidate.need_bytes - 206 * MB > 0
    assert str(found.over_bytes(0)) in found.because[0]
    assert "activations" in found.because[0]
    # Where nothing fits at all there is no chosen plan to compare with.
    nothing = explain.explain(replace(request_, mem_bytes=MB), "pp=2,cp=2,dp=1")
    assert (nothing.verdict, nothing.chosen) == ("pruned", None)


def test_terms_of_a_stage_add_up_to_the_step_and_to_the_peak(request_: SearchRequest) -> None:
    for text in ("pp=4,cp=1,dp=1", "pp=2,cp=2,dp=1,schedule=gpipe", "pp=1,cp=4,dp=1,context=allgather"):
        cost = explain.explain(request_, text).candidate
        for stage in cost.stages:
            assert sum(stage.time_s.values()) == pytest.approx(cost.step_s, rel=1e-9)
            assert stage.time_s[WAITING] >= 0
        assert max(stage.peak_bytes for stage in cost.stages) == cost.peak_bytes


def test_a_faster_plan_that_a_pin_excluded_was_left_out(request_: SearchRequest) -> None:
    best = search.find(request_).plan
    pinned = replace(request_, pp=2)
    assert best.dims.pp != 2
    found = explain.explain(pinned, f"pp={best.dims.pp},cp={best.dims.cp},dp={best.dims.dp}")
    assert found.chosen is not None
    assert found.candidate.step_s < found.chosen.step_s
    assert (found.verdict, found.because) == ("left out", ["faster, but the search was told --pp 2"])
    # One that is slower than the chosen plan lost, pinned out or not; the chosen one won under its pins.
    slow = max(
        (explain.explain(pinned, f"pp={dims.pp},cp={dims.cp},dp={dims.dp}") for dims in factorisations(4)),
        key=lambda each: each.candidate.step_s,
    )
    assert slow.verdict == "lost"
    chosen = search.find(pinned).plan.dims
    assert explain.explain(pinned, f"pp={chosen.pp},cp={chosen.cp},dp={chosen.dp}").verdict == "won"


def test_where_pins_leave_nothing_that_fits_a_candidate_did_not_win(request_: SearchRequest) -> None:
    stored = replace(request_, recompute="none")
    with pytest.raises(MgraphError) as caught:
        search.find(replace(stored, mem_bytes=MB))
    tight = replace(stored, mem_bytes=int(str(caught.value.details["minimum_bytes"])) - 1)
    with pytest.raises(MgraphError, match="a plan fits without --recompute none") as caught:
        search.find(tight)
    assert caught.value.exit_code == 3
    lean = search.find(replace(tight, recompute=None)).plan.dims
    found = explain.explain(tight, f"pp={lean.pp},cp={lean.cp},dp={lean.dp}")
    assert found.candidate.need_bytes <= tight.mem_bytes  # type: ignore[operator]
    assert (found.verdict, found.chosen) == ("left out", None)
    assert found.because == ["it fits, but the search was told --recompute none"]
    assert found.values()["verdict"] == "left out"


def test_a_faster_plan_with_other_micro_batches_was_left_out(request_: SearchRequest, tmp_path: Path) -> None:
    pinned = replace(request_, pp=2, dp=2)
    best = search.find(pinned).plan
    # Powers of two divide the 512 targets of a replica; what lies between may be better.
    others = [search.run(replace(pinned, microbatches=count), tmp_path / f"{count}.json") for count in (5, 6, 7)]
    fast = min(others, key=lambda plan: plan.predicted.step_s)  # type: ignore[union-attr]
    count = fast.num_microbatches
    assert fast.predicted is not None
    assert best.predicted is not None
    assert fast.predicted.step_s < best.predicted.step_s
    found = explain.compare(pinned, tmp_path / f"{count}.json")
    assert found.verdict == "left out"
    assert found.because == [
        "faster, but of micro-batches the search tries divisors of 512 up to 8, and others where it is told "
        f"--microbatches {count}"
    ]
    assert explain.compare(replace(pinned, microbatches=count), tmp_path / f"{count}.json").verdict == "won"
    told = explain.compare(replace(pinned, microbatches=4), tmp_path / f"{count}.json")
    assert (told.verdict, told.because) == ("left out", ["faster, but the search was told --microbatches 4"])


def test_a_plan_that_is_called_otherwise_is_still_the_chosen_one(request_: SearchRequest, tmp_path: Path) -> None:
    best = search.find(request_).plan
    assert best.dims.cp == 1
    # On one host the order of the axes means nothing, nor does how rows travel where one rank has them all.
    other = best.model_copy(update={"mesh_order": ["dp", "cp", "pp"], "context": "allgather"})
    other.save(tmp_path / "other.json")
    found = explain.compare(request_, tmp_path / "other.json")
    assert (found.verdict, found.because) == ("won", [])


@pytest.mark.parametrize(
    "text", ["pp=3,cp=1,dp=1", "pp=2,cp=1,dp=1", "pp", "pp=two", "rows=4", "pp=1,cp=1,dp=4,schedule=x"]
)
def test_candidates_that_cannot_be_exit_2(request_: SearchRequest, text: str) -> None:
    with pytest.raises(MgraphError) as caught:
        explain.explain(request_, text)
    assert caught.value.exit_code == 2


def test_compare_forecasts_the_other_plan_by_this_cost_model(request_: SearchRequest, tmp_path: Path) -> None:
    other = search.run(replace(request_, pp=2, schedule="1f1b"), tmp_path / "other.json")
    found = explain.compare(request_, tmp_path / "other.json")
    assert other.predicted is not None
    assert found.candidate.step_s == pytest.approx(other.predicted.step_s, rel=1e-12)
    assert found.candidate.peak_bytes == other.predicted.peak_bytes
    assert found.verdict == "lost"
    changed = other.model_copy(update={"gpus": 2, "dims": other.dims.model_copy(update={"dp": 1, "cp": 1})})
    changed.save(tmp_path / "two.json")
    with pytest.raises(MgraphError, match="--gpus 2") as caught:
        explain.compare(request_, tmp_path / "two.json")
    assert caught.value.exit_code == 4
    for key, value in (("dtype", "float64"), ("dtype", "bfloat16"), ("matmul_precision", "tf32")):
        retrained(other, key, value).save(tmp_path / "train.json")
        with pytest.raises(MgraphError, match=rf"train\.{key} = '{value}'") as caught:
            explain.compare(request_, tmp_path / "train.json")
        assert caught.value.exit_code == 4
    assert other.workload.graph is not None
    graph = other.workload.graph.model_copy(update={"digest": "f" * 64})
    elsewhere = {
        f"graph.digest = '{'f' * 12}'": {"workload": other.workload.model_copy(update={"graph": graph})},
        "device = 'cuda'": {"device": "cuda"},
        "hosts = 2": {"hosts": 2},
    }
    for words, change in elsewhere.items():
        other.model_copy(update=change).save(tmp_path / "elsewhere.json")
        with pytest.raises(MgraphError, match=words) as caught:
            explain.compare(request_, tmp_path / "elsewhere.json")
        assert caught.value.exit_code == 4
    retrained(other, "lr", 0.5).save(tmp_path / "train.json")  # costs nothing, so it stands in no way
    assert explain.compare(request_, tmp_path / "train.json").candidate == found.candidate
    with pytest.raises(MgraphError, match=r"model\.num_layers") as caught:
        explain.compare(replace(request_, overrides={"model.num_layers": "14"}), tmp_path / "other.json")
    assert caught.value.exit_code == 4


def retrained(plan: Plan, key: str, value: object) -> Plan:
    """The plan for a workload whose ``train`` section differs by one key."""
    train = plan.workload.train.model_copy(update={key: value})
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"train": train})})


class Page(HTMLParser):
    """Counts elements, keeps text and whatever could reach out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.outside: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "srcset", "onclick", "action")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_report_shows_the_search_and_reaches_for_nothing(request_: SearchRequest, tmp_path: Path) -> None:
    request = replace(request_, pp=2)
    done = search.write(request, tmp_path / "plan.json", report=tmp_path / "r.html", trace=None)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.outside == []
    assert "script" not in page.seen
    assert "url(" not in text
    assert page.seen["svg"] == 3
    plotted = len(done.plan.pareto) + len(done.plan.runners_up)
    assert page.seen["circle"] == plotted
    assert page.seen["table"] == 2
    # Each stage's terms above zero, the margin, and every piece of work of the timeline.
    bars = sum(sum(size > 0 for size in stage.memory_bytes.values()) + 1 for stage in done.cost.stages)
    assert text.count('class="bar"') == bars
    assert text.count('class="forward"') == 2 * done.plan.num_microbatches
    assert "pp=4,cp=1,dp=1" in page.words
    # Without the pin another plan is faster: the page says what left it out.
    assert search.find(request_).cost.step_s < done.cost.step_s
    assert "the search was told --pp 2" in page.words
    assert Plan.load(tmp_path / "plan.json") == done.plan


def test_a_plan_that_is_not_proven_says_how_far_it_may_be_off(
    request_: SearchRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    done = search.find(request_)
    assert done.plan.search is not None
    for gap, said in ((0.0, None), (0.0312, "at most 3.2 % from the optimum"), (1e-6, "at most 0.1 %")):
        counts = done.plan.search.model_copy(update={"max_gap": gap})
        plan = done.plan.model_copy(update={"search": counts})
        tables.warn_unproven(plan, Screen.stderr())
        tables.show_plan(plan, done.cost, Path("plan.json"), 2, Screen.stderr())
        page = Page()
        page.feed(report.page(request_, replace(done, plan=plan)))
        screen = " ".join(capsys.readouterr().err.split())
        for shown in (screen, page.words):
            assert shown.lower().count("best found of") == (said is not None)
            assert shown.count("from the optimum") == (said is not None)
            assert said is None or said in shown
        assert ("warning:" in screen) == (said is not None)


def test_the_trace_holds_every_piece_of_work_once(request_: SearchRequest, tmp_path: Path) -> None:
    done = search.write(replace(request_, pp=2), tmp_path / "p.json", report=None, trace=tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"device", "link", "host"}
    passes = [span for span in spans if span["name"].split()[0] in ("forward", "backward")]
    assert len(passes) == len({(span["pid"], span["name"]) for span in passes}) == 2 * 2 * done.plan.num_microbatches
    # Messages travel beside the work: down to stage 1, up to stage 0, each on a track where nothing overlaps.
    messages = [span for span in spans if span["name"].startswith("receive for ")]
    assert len(messages) == 2 * done.plan.num_microbatches
    assert {span["cat"] for span in messages} == {"link"}
    assert {span["cat"] for span in passes} == {"device"}
    for track in {(span["pid"], span["tid"]) for span in spans}:
        mine = sorted((span["ts"], span["dur"]) for span in spans if (span["pid"], span["tid"]) == track)
        assert all(a + length <= b + 0.002 for (a, length), (b, _) in itertools.pairwise(mine))  # rounded to 0.001
    assert done.plan.predicted is not None
    end = max(span["ts"] + span["dur"] for span in spans) / 1e6
    assert end == pytest.approx(done.plan.predicted.step_s, rel=1e-3)


def test_places_that_cannot_be_written_are_told_before_the_search(request_: SearchRequest, tmp_path: Path) -> None:
    with pytest.raises(MgraphError) as caught:
        search.write(request_, tmp_path / "p.json", report=tmp_path / "none" / "r.html", trace=None)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
