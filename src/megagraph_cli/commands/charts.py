"""Inline SVG for the report: a scatter, stacked bars and a timeline, with no script and nothing from the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megagraph_cli.artifacts.trace import LANES, Span
from megagraph_cli.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT, TOP = 860, 110, 36, 20
COLOURS = ("#4472c4", "#ed7d31", "#70ad47", "#ffc000", "#7e57c2", "#26a69a", "#8d6e63", "#ec407a")
LEGEND_LINE = 18
MOST_SPANS = 5000


@dataclass(frozen=True)
class Point:
    """A plan in the scatter. ``kind``: chosen, front or other."""

    step_s: float
    peak_bytes: float
    kind: str
    label: str


def ticks(most: float, count: int = 5) -> list[float]:
    """Round values from 0 up to at least ``most``."""
    if most <= 0:
        return [0.0]
    raw = most / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def scatter(points: Sequence[Point], limit_bytes: float) -> str:
    """Step time to the right, peak memory upwards, the limit as a line where it is near."""
    height, bottom = 340, 40
    x_ticks = ticks(max(point.step_s for point in points))
    highest = max(point.peak_bytes for point in points)
    y_ticks = ticks(max(highest, limit_bytes if limit_bytes < 2 * highest else 0))
    plot_w, plot_h = WIDTH - LEFT - RIGHT, height - TOP - bottom

    def x(value: float) -> float:
        return LEFT + plot_w * value / x_ticks[-1]

    def y(value: float) -> float:
        return TOP + plot_h * (1 - value / y_ticks[-1])

    parts = [_grid_y(y(tick), format_bytes(tick)) for tick in y_ticks]
    parts += [_text(x(tick), height - bottom + 16, format_seconds(tick), "middle") for tick in x_ticks]
    parts.append(_text(LEFT + plot_w / 2, height - 4, "step time", "middle"))
    if limit_bytes <= y_ticks[-1]:
        parts.append(_limit(y(limit_bytes), f"limit {format_bytes(limit_bytes)}"))
    front = sorted((point for point in points if point.kind != "other"), key=lambda point: point.step_s)
    if len(front) > 1:
        path = " ".join(f"{x(point.step_s):.1f},{y(point.peak_bytes):.1f}" for point in front)
        parts.append(f'<polyline class="front" points="{path}"/>')
    for point in sorted(points, key=lambda point: point.kind == "chosen"):
        radius = 7 if point.kind == "chosen" else 4
        parts.append(
            f'<circle class="{point.kind}" cx="{x(point.step_s):.1f}" cy="{y(point.peak_bytes):.1f}" r="{radius}">'
            f"<title>{escape(point.label)}</title></circle>"
        )
    return _svg(height, parts, "pareto")


def stacked_bars(bars: Sequence[tuple[str, dict[str, float]]], limit_bytes: float) -> str:
    """One bar for each (label, bytes by term) against the limit; terms in one order and colour throughout."""
    terms = list(dict.fromkeys(term for _, values in bars for term in values))
    row, bottom = 26, 22
    end = TOP + row * len(bars)
    height = end + bottom + LEGEND_LINE * (1 + max(line for _, line in _legend_places(terms))) + 6
    most = max(max(sum(values.values()) for _, values in bars), limit_bytes)
    x_ticks = ticks(most)
    plot_w = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + plot_w * value / x_ticks[-1]

    parts = [_text(x(tick), end + 12, format_bytes(tick), "middle") for tick in x_ticks]
    for number, (label, values) in enumerate(bars):
        top, begin = TOP + row * number, 0.0
        parts.append(_text(LEFT - 8, top + 15, label, "end"))
        for term, value in values.items():
            colour = COLOURS[terms.index(term) % len(COLOURS)]
            width = max(0.0, x(begin + value) - x(begin))
            parts.append(
                f'<rect class="bar" x="{x(begin):.1f}" y="{top}" width="{width:.2f}" height="{row - 8}" '
                f'fill="{colour}"><title>{escape(f"{label}: {term} {format_bytes(value)}")}</title></rect>'
            )
            begin += value
    parts.append(
        f'<line class="limit" x1="{x(limit_bytes):.1f}" x2="{x(limit_bytes):.1f}" y1="{TOP - 8}" y2="{end}"/>'
        + _text(x(limit_bytes) - 4, TOP - 8, f"limit {format_bytes(limit_bytes)}", "end")
    )
    parts += _legend(terms, end + bottom + LEGEND_LINE)
    return _svg(height, parts, "memory")


def timeline(spans: Sequence[Span], names: dict[int, str]) -> str:
    """Every stage's lanes over one step; a very long step is cut, and says so."""
    shown = sorted(spans, key=lambda span: span.start_s)[:MOST_SPANS]
    end_s = max(span.end_s for span in shown)
    lane, gap, bottom = 14, 10, 36
    row = len(LANES) * lane + gap
    height = TOP + row * len(names) + bottom
    plot_w = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + plot_w * value / end_s

    parts = [
        _text(x(tick), height - 12, format_seconds(tick), "middle") for tick in ticks(end_s) if tick <= end_s * 1.001
    ]
    order = {process: number for number, process in enumerate(sorted(names))}
    for process, number in order.items():
        for index, name in enumerate(LANES):
            label = f"{process} {name}" if index == 0 else name
            parts.append(_text(LEFT - 8, TOP + row * number + lane * index + 11, label, "end"))
    for span in shown:
        top = TOP + row * order[span.process] + lane * LANES.index(span.lane)
        kind = span.name.split()[0]
        parts.append(
            f'<rect class="{kind}" x="{x(span.start_s):.2f}" y="{top}" '
            f'width="{max(0.4, x(span.end_s) - x(span.start_s)):.2f}" height="{lane - 2}">'
            f"<title>{escape(f'{span.name}: {format_seconds(span.end_s - span.start_s)}')}</title></rect>"
        )
    note = "" if len(shown) == len(spans) else f"<p>The first {len(shown)} of {len(spans)} pieces of work.</p>"
    return _svg(height, parts, "timeline") + note


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    inside = "\n".join(parts)
    return f'<svg id="{name}" viewBox="0 0 {WIDTH} {height}" role="img">\n{inside}\n</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid_y(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 8, y + 4, label, "end")


def _limit(y: float, label: str) -> str:
    line = f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(WIDTH - RIGHT, y - 4, label, "end")


def _legend_places(terms: Sequence[str]) -> list[tuple[float, int]]:
    """Where each term's entry begins, and in which line: as many as fit between the margins."""
    places, x, line = [], float(LEFT), 0
    for term in terms:
        width = 30 + 7.2 * len(term)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, line = float(LEFT), line + 1
        places.append((x, line))
        x += width
    return places


def _legend(terms: Sequence[str], top: float) -> list[str]:
    parts = []
    for index, (term, (x, line)) in enumerate(zip(terms, _legend_places(terms), strict=True)):
        y = top + LEGEND_LINE * line
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        parts.append(_text(x + 14, y, term, "start"))
    return parts
