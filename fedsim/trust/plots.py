"""Line charts for a page, drawn by matplotlib as SVG that is light or dark as its page is.

matplotlib is imported when a chart is drawn, so that no command waits for it. Equal charts give
equal bytes.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from html import escape

from fedsim.accounting import at_most
from fedsim.errors import brief

SIZE = 5.6, 3.5  # inches of 72 points: about as wide as a telephone, so that text is legible there
POINTS_IN_TABLE = 12
COLOURS = {
    "#010101": "--ink",
    "#020202": "--rule",
    "#030303": "--a",
    "#040404": "--b",
    "#050505": "--c",
}
"""Stand-ins, which matplotlib writes, and the colours of the page that take their place."""
INK, RULE, *LINES = COLOURS
STYLE = {
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans"],  # which comes with matplotlib: equal sizes everywhere
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "fedsim",  # the same bytes each time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": RULE,
    "legend.frameon": False,
}


@dataclasses.dataclass(frozen=True)
class Series:
    """A line: its name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines with a title and axes. Raises: ValueError: no point can be drawn."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    """Logarithmic in y; values that are not positive are left out."""
    bounds: bool = False
    """Whether the values are upper bounds, which are rounded up where they are shown as numbers."""

    def __post_init__(self) -> None:
        if not any(self.drawn(each) for each in self.series):
            raise ValueError(f"chart={self.title}: expected points")

    def drawn(self, series: Series) -> list[tuple[float, float]]:
        """The points of a line that can be drawn."""
        pairs = [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True)]
        finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
        return [(x, y) for x, y in finite if y > 0 or not self.log_y]

    def rows(self) -> list[tuple[str, str, str]]:
        """Some points of each line as (name, x, y), for a table: counts are shown as they are."""
        shown = at_most if self.bounds else format
        rows = []
        for line in self.series:
            last = len(line.x) - 1
            steps = range(POINTS_IN_TABLE + 1)
            for i in sorted({round(step * last / POINTS_IN_TABLE) for step in steps}):
                x, y = (
                    str(v) if isinstance(v, int) else shown(v, ".4g")
                    for v in (line.x[i], line.y[i])
                )
                rows.append((line.name, x, y))
        return rows


def svg(chart: Chart) -> str:
    """The chart as one <svg> element for an HTML page with the variables of COLOURS."""
    import io

    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    text = io.StringIO()
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for number, line in enumerate(chart.series):
            pairs = chart.drawn(line)
            if pairs:
                axes.plot(
                    *zip(*pairs, strict=True),
                    color=LINES[number % len(LINES)],
                    linestyle=(0, (5, 3)) if line.dashed else "-",
                    marker="o" if len(pairs) == 1 else "",
                    label=brief(line.name),
                    clip_on=False,
                )
        axes.set(xlabel=brief(chart.x_label), ylabel=brief(chart.y_label))
        if chart.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda y, _: f"1e{math.log10(y):.0f}")
            axes.yaxis.set_minor_formatter(lambda y, _: "")
        else:
            axes.set_ylim(
                bottom=min(0.0, *(y for line in chart.series for _, y in chart.drawn(line)))
            )
        if all(isinstance(x, int) for line in chart.series for x in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(chart.series) > 1:
            figure.legend(loc="outside upper left", ncols=2)
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=unsigned)
    return for_page(text.getvalue(), chart.title)


def for_page(drawn: str, title: str) -> str:
    """An SVG file as an element of a page: with the page's colours, and without any address."""
    element = drawn[drawn.index("<svg") :]
    element = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element).replace("xlink:href", "href")
    element = re.sub(r"font-family: [^;]*; ", "", element)
    for stand_in, name in COLOURS.items():
        element = element.replace(stand_in, f"var({name})")
    head = f'<svg class="chart" role="img" aria-label="{escape(title)}"'
    return re.sub(r'<svg( (width|height|version)="[^"]*")*', head, element, count=1)
