"""Pages from templates: Markdown by Jinja2, and the same as one HTML file by markdown-it-py.

What a template writes is Markdown. Every value that is put into it is text: whatever could become
markup is escaped, so that no name, path or setting adds a heading, a link or a script; `code` in
a value's backticks stays code. The HTML page has one style sheet, light or dark as the reader's
system is, and neither scripts nor links nor anything fetched. A chart is a picture in HTML and a
table of its points in Markdown.
"""

import dataclasses
import functools
import html
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.errors import brief, printable
from fedsim.files import make_place, write_atomically

if TYPE_CHECKING:  # libraries that no command loads before it makes a page
    from jinja2 import Environment
    from markdown_it import MarkdownIt

TEMPLATES = Path(__file__).parent / "templates"
FIGURE = "figure"
"""Marks a fenced block that stands for a chart, by number. No value can write one: its backticks
are escaped."""
CODE = re.compile(r"(?<!`)(`[^`|]+`)(?!`)")
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
AT_START = re.compile(r"^(\d*)([#+=.)-])(?=[#+=-]*(?:\s|$))")
"""Where a value would begin a list, a heading or a line across the page."""


def write(out: Path, name: str, template: str, **facts: Any) -> dict[str, str]:
    """Write NAME.html and NAME.md into a directory, which is made. Returns: where they are.

    Args: facts: what the template names; each is needed, `title` too.
    """
    texts = {"html": as_html(template, **facts), "markdown": as_markdown(template, **facts)}
    make_place(out)
    files = {"html": out / f"{name}.html", "markdown": out / f"{name}.md"}
    for kind, file in files.items():
        write_atomically(file, texts[kind].encode())
    return {kind: str(file) for kind, file in files.items()}


def as_markdown(template: str, **facts: Any) -> str:
    """The page as Markdown; a chart as a table of some of its points."""

    def points(chart: Chart) -> Markup:
        return Markup(_render("chart.md.jinja", chart=chart))

    return _render(template, **facts, chart=points)


def as_html(template: str, **facts: Any) -> str:
    """The page as one HTML file; a chart as a picture."""
    charts: list[Chart] = []

    def figure(chart: Chart) -> Markup:
        charts.append(chart)
        return Markup(f"```{FIGURE}\n{len(charts) - 1}\n```\n")

    text = _render(template, **facts, chart=figure)
    body = _parser().render(text, {"charts": charts})
    title = html.escape(printable(str(facts["title"]), kept=""))
    return _render("page.html.jinja", title=Markup(title), body=Markup(body))


def escaped(value: Any) -> Markup:
    """A value as one line of Markdown that shows its text and nothing else."""
    if isinstance(value, Markup):  # what a template or a macro wrote
        return value
    text = printable(" ".join(str(value).split()), kept="")
    parts = CODE.split(text)  # code at odd places
    parts[::2] = [MARKUP.sub(r"\\\g<0>", html.escape(each, quote=False)) for each in parts[::2]]
    return Markup(AT_START.sub(r"\1\\\2", "".join(parts)))


def code(value: Any) -> Markup:
    """A value as code, where it can be: a span of code cannot hold backticks, nor a table bars."""
    return escaped(f"`{value}`")


def fenced(lines: Iterable[str]) -> Markup:
    """Commands as a block of code, whatever they hold."""
    text = printable("\n".join(lines), kept="\n\t")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}sh\n{text}\n{fence}")


def one_line(text: str) -> Markup:
    """What a template wrote over several lines as a cell of a table."""
    return Markup(" ".join(text.split()))


def _render(template: str, **facts: Any) -> str:
    return _environment().get_template(template).render(**facts)


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"at_most": at_most, "at_least": at_least, "one_line": one_line}
    made.filters |= {"code": code, "fenced": fenced, "commas": "{:,}".format}
    return made


@functools.cache
def _parser() -> "MarkdownIt":
    """Markdown without HTML, links or pictures: a page needs none, and none can get in."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.disable(["link", "image", "autolink", "reference", "html_block", "html_inline"])

    def fence(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        if token.info != FIGURE:
            return f"<pre>{html.escape(token.content)}</pre>\n"
        chart = env["charts"][int(token.content)]
        caption = f"<figcaption>{html.escape(chart.title)}</figcaption>"
        return f"<figure>{caption}{svg(chart)}</figure>\n"

    made.add_render_rule("fence", fence)
    made.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return made


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
