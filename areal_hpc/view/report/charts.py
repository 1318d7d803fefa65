"""Curves and bars as inline SVG, colored by the page's style sheet. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT = 420, 170
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 22
MAX_CURVE_POINTS = 400
"""Of a curve: more are drawn as the lowest and the highest of each stretch."""
MAX_BARS = 100
MIN_RELATIVE_RANGE = 1e-5
N_SERIES_COLORS = 9
"""Series that the style sheet has colors for; further ones begin anew."""


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    """(step, value), by step."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    svg: str
    """Markup, whose texts are escaped."""
    legend: tuple[str, ...]
    """Labels by color; empty where there is one series."""


@dataclass(frozen=True, slots=True)
class _AxisRanges:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def to_svg_point(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / ((self.x_high - self.x_low) or 1)
        up = (y - self.y_low) / ((self.y_high - self.y_low) or 1)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )


def draw_curves(
    title: str, unit: str, series: Sequence[Series], marks: Sequence[float] = ()
) -> Chart | None:
    """Curves over steps, with dashed lines at `marks`; None if there is nothing to draw."""
    finite = [
        Series(one.label, [point for point in one.points if math.isfinite(point[1])])
        for one in series
    ]
    points = [point for one in finite for point in one.points]
    if not points:
        return None
    ticks = choose_enclosing_ticks(min(y for _, y in points), max(y for _, y in points))
    frame = _AxisRanges(
        min(x for x, _ in points), max(x for x, _ in points), min(ticks), max(ticks)
    )
    parts = list(_draw_axes(frame, ticks))
    for mark in marks:
        if frame.x_low <= mark <= frame.x_high:
            at, top = frame.to_svg_point(mark, frame.y_high)
            parts.append(
                f'<line class="mark" x1="{at}" y1="{top}" x2="{at}" y2="{HEIGHT - BOTTOM}"/>'
            )
    for number, one in enumerate(finite):
        parts += _draw_curve(frame, one, number)
    return Chart(title, unit, _wrap_in_svg(title, parts), _make_legend(series))


def draw_bars(title: str, unit: str, layers: Sequence[Series]) -> Chart | None:
    """Stacked bars, one a step or a stretch of steps; every layer has the same steps."""
    if not layers or not layers[0].points:
        return None
    steps = [x for x, _ in layers[0].points]
    size = math.ceil(len(steps) / MAX_BARS)
    stretches = range(0, len(steps), size)
    heights = [
        [fmean(y for _, y in one.points[first : first + size]) for first in stretches]
        for one in layers
    ]
    highest = max(sum(column) for column in zip(*heights, strict=True))
    ticks = choose_enclosing_ticks(0.0, highest)
    frame = _AxisRanges(steps[0] - 0.5, steps[-1] + 0.5, 0.0, max(ticks))
    parts = list(_draw_axes(frame, ticks))
    for place, first in enumerate(stretches):
        base = 0.0
        last = steps[min(first + size, len(steps)) - 1]
        for number, layer in enumerate(heights):
            left, top = frame.to_svg_point(steps[first] - 0.45, base + layer[place])
            right, bottom = frame.to_svg_point(last + 0.45, base)
            base += layer[place]
            if layer[place] > 0:
                parts.append(
                    f'<rect class="f{number % N_SERIES_COLORS + 1}" x="{left}" y="{top}" '
                    f'width="{max(right - left, 0.5):.1f}" height="{bottom - top:.1f}"/>'
                )
    return Chart(title, unit, _wrap_in_svg(title, parts), _make_legend(layers))


def choose_enclosing_ticks(low: float, high: float, count: int = 4) -> list[float]:
    if high - low <= MIN_RELATIVE_RANGE * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / width), math.ceil(high / width - 1e-9)
    return [number * width for number in range(first, last + 1)]


def render_standalone_svg(chart: Chart) -> str:
    """A chart as a file of its own, with its title and legend below."""
    colors = ("#2457c5", "#c2571a", "#1a7f4b", "#7b3fb5")
    style = (
        "svg{background:#fff;font:10px sans-serif}.grid{stroke:#deded9}.tick{fill:#5f666f}"
        ".end{text-anchor:end}.curve{fill:none;stroke-width:1.6}.mark{stroke:#5f666f}"
        + "".join(
            f".s{place}{{stroke:{color}}}.f{place}{{fill:{color}}}"
            for place, color in enumerate(colors, 1)
        )
    )
    classes = ["tick", *(f"f{place % len(colors) + 1}" for place in range(len(chart.legend)))]
    captions = "".join(
        f'<text class="{class_}" x="{LEFT}" y="{HEIGHT + 14 * place}">{escape(text)}</text>'
        for place, (class_, text) in enumerate(
            zip(classes, (chart.title, *chart.legend), strict=True), 1
        )
    )
    height = HEIGHT + 14 * len(classes) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{2 * WIDTH}"><style>{style}</style>{chart.svg}{captions}</svg>\n'
    ).replace('<svg viewBox="0 0', f'<svg height="{HEIGHT}" viewBox="0 0')


def _wrap_in_svg(title: str, elements: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(elements)}</svg>"
    )


def _draw_axes(frame: _AxisRanges, ticks: Sequence[float]) -> Iterator[str]:
    for tick in ticks:
        left, y = frame.to_svg_point(frame.x_low, tick)
        label = "0" if abs(tick) < 1e-15 else f"{tick:.6g}"
        yield f'<line class="grid" x1="{left}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>'
        yield f'<text class="tick end" x="{LEFT - 5}" y="{y + 3.5}">{label}</text>'
    for x in dict.fromkeys((math.ceil(frame.x_low), math.floor(frame.x_high))):
        at, _ = frame.to_svg_point(x, frame.y_low)
        side = "end" if at > WIDTH / 2 else "start"
        yield f'<text class="tick {side}" x="{at}" y="{HEIGHT - 6}">{x}</text>'


def _draw_curve(frame: _AxisRanges, series: Series, series_index: int) -> Iterator[str]:
    color = f"s{series_index % N_SERIES_COLORS + 1}"
    placed = [frame.to_svg_point(x, y) for x, y in thin_out_to_extremes(series.points)]
    line = " ".join(f"{x},{y}" for x, y in placed)
    yield f'<polyline class="curve {color}" points="{line}"/>'
    if len(placed) <= 12:  # a few evaluations, or a single one, which a line does not show
        for x, y in placed:
            fill = f"f{series_index % N_SERIES_COLORS + 1}"
            yield f'<circle class="{fill}" cx="{x}" cy="{y}" r="2.4"/>'


def thin_out_to_extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_CURVE_POINTS` of the points: of each stretch the lowest and the highest."""
    if len(points) <= MAX_CURVE_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_CURVE_POINTS)
    kept = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda one: one[1]), max(stretch, key=lambda one: one[1])}
        kept += sorted(ends)
    return kept


def _make_legend(series: Sequence[Series]) -> tuple[str, ...]:
    return tuple(one.label for one in series) if len(series) > 1 else ()
