"""Line charts as SVG text that takes its colours from the page it is in: light or dark.

Small on purpose: axes, lines, steps or bars, a legend. Nothing is fetched and nothing runs.
"""

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 380, 250  # as wide as a telephone, so that text is legible there
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 42
MOST_TICKS = 5


@dataclasses.dataclass(frozen=True)
class Series:
    """A line: its name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a chart shows. Raises: ValueError: nothing can be drawn of it."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    """Logarithmic in y; values that are not positive are left out."""
    bounds: bool = False
    """Whether the values are upper bounds, which are rounded up where they are shown as numbers."""

    def __post_init__(self) -> None:
        if not any(_points(self, each) for each in self.series):
            raise ValueError(f"chart={self.title}: expected points")


def svg(chart: Chart) -> str:
    """The chart as one <svg> element, with classes `axis`, `line-0`, `line-1`, ... for a page."""
    points = [point for each in chart.series for point in _points(chart, each)]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    y_ticks = _decades(lowest, highest) if chart.log_y else _ticks(min(0.0, lowest), highest)
    x_at = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    y_at = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(chart.title)}">'
    ]
    for tick in y_ticks:
        y, shown = y_at(tick), f"1e{tick:g}" if chart.log_y else f"{tick:g}"
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for tick in x_ticks:
        x, y = x_at(tick), HEIGHT - BOTTOM
        parts.append(f'<path class="axis" d="M{x:.1f} {y}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    for number, each in enumerate(chart.series):
        path = "L".join(f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in _points(chart, each))
        style = " dashed" if each.dashed else ""
        parts.append(f'<path class="line line-{number}{style}" d="M{path}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = html.escape(chart.x_label)
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>')
    upright = f'transform="rotate(-90 12 {(TOP + HEIGHT - BOTTOM) / 2})"'
    label = html.escape(chart.y_label)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {upright}>{label}</text>')
    return "".join([*parts, "</svg>", _legend(chart)])


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2:
        return ""
    names = (
        f'<li><span class="key key-{number}"></span>{html.escape(each.name)}</li>'
        for number, each in enumerate(chart.series)
    )
    return f'<ul class="legend">{"".join(names)}</ul>'


def _points(chart: Chart, each: Series) -> list[tuple[float, float]]:
    """The points that can be drawn, with the logarithm of y where the axis is logarithmic."""
    pairs = [(float(x), float(y)) for x, y in zip(each.x, each.y, strict=True)]
    pairs = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    return [(x, math.log10(y)) for x, y in pairs if y > 0] if chart.log_y else pairs


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / MOST_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Whole exponents of ten, not too many."""
    first, last = math.floor(low), math.ceil(high)
    step = max(1, math.ceil((last - first) / MOST_TICKS))
    return [float(e) for e in range(first, last + step, step)] or [float(first)]
