"""Pages from templates: Markdown by Jinja2, and the same as one HTML file by markdown-it-py.

Templates are Markdown. Values in them are text: possible markup is escaped, so that no name, path
or setting adds a heading, a link or a script; code in a value's backticks stays code. The HTML page
has one style sheet, light or dark as the reader's system, and no scripts, links or fetched files. A
chart is a picture in HTML, drawn as SVG by matplotlib, and a table of its points in Markdown.

Jinja2, markdown-it-py and matplotlib are imported when a page is made, so that no command waits for
them. Equal values give equal bytes.
"""

import dataclasses
import functools
import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.errors import brief, printable
from fedsim.files import make_place, write_atomically
from fedsim.installation import optional

if TYPE_CHECKING:  # loaded when a page is made
    from jinja2 import Environment
    from markdown_it import MarkdownIt

TEMPLATES = Path(__file__).parent / "templates"
FIGURE = "figure"
"""Language of a fenced block with the number of a chart; no value can write one, because its
backticks are escaped."""
CODE = re.compile(r"(?<!`)(`[^`|]+`)(?!`)")
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
AT_START = re.compile(r"^(\d*)([#+=.)-])(?=[#+=-]*(?:\s|$))")
"""The start of a value that Markdown would read as a list, a heading or a rule."""


def write(out: Path, name: str, template: str, **facts: Any) -> dict[str, str]:
    """Write NAME.html and NAME.md into a directory, which is created.

    Args:
      out: the directory.
      facts: all values that the template uses, `title` among them.

    Returns:
      The paths, as "html" and "markdown".
    """
    texts = {"html": as_html(template, **facts), "markdown": as_markdown(template, **facts)}
    make_place(out)
    files = {"html": out / f"{name}.html", "markdown": out / f"{name}.md"}
    for kind, file in files.items():
        write_atomically(file, texts[kind].encode())
    return {kind: str(file) for kind, file in files.items()}


def as_markdown(template: str, **facts: Any) -> str:
    """The page as Markdown, with a table of points for each chart."""

    def points(chart: Chart) -> Markup:
        return Markup(_render("chart.md.jinja", chart=chart))

    return _render(template, **facts, chart=points)


def as_html(template: str, **facts: Any) -> str:
    """The page as one HTML file, with a picture for each chart."""
    charts: list[Chart] = []

    def figure(chart: Chart) -> Markup:
        charts.append(chart)
        return Markup(f"```{FIGURE}\n{len(charts) - 1}\n```\n")

    text = _render(template, **facts, chart=figure)
    body = _parser().render(text, {"charts": charts})
    title = html.escape(printable(str(facts["title"]), kept=""))
    return _render("page.html.jinja", title=Markup(title), body=Markup(body))


def escaped(value: Any) -> Markup:
    """A value as one line of Markdown that shows exactly its text."""
    if isinstance(value, Markup):  # written by a template or a macro
        return value
    text = printable(" ".join(str(value).split()), kept="")
    parts = CODE.split(text)  # code is at odd indices
    parts[::2] = [MARKUP.sub(r"\\\g<0>", html.escape(each, quote=False)) for each in parts[::2]]
    return Markup(AT_START.sub(r"\1\\\2", "".join(parts)))


def code(value: Any) -> Markup:
    """A value as code, unless it has backticks, or bars, which would end a cell of a table."""
    return escaped(f"`{value}`")


def fenced(lines: Iterable[str], language: str = "sh") -> Markup:
    """Lines, of commands or of text, as a block of code, with a fence longer than any backticks in
    them."""
    text = printable("\n".join(lines), kept="\n\t")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{text}\n{fence}")


def one_line(text: str) -> Markup:
    """Text that a template wrote on several lines, as a cell of a table."""
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
    """A parser of Markdown without HTML, links or images, so that no value can add them."""
    with optional():
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


SIZE = 5.6, 3.5  # inches of 72 points: about the width of a phone, so that text is legible there
POINTS_IN_TABLE = 12
COLOURS = {
    "#010101": "--ink",
    "#020202": "--rule",
    "#030303": "--a",
    "#040404": "--b",
    "#050505": "--c",
}
"""Placeholder colours for matplotlib, and the variables of the page that replace them."""
INK, RULE, *LINES = COLOURS
STYLE = {
    "font.size": 10,
    "font.sans-serif": [
        "DejaVu Sans"
    ],  # comes with matplotlib, so that text has equal sizes everywhere
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
    """A line of a chart: its name and points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines with a title and labels of the axes.

    Raises:
      ValueError: no point can be drawn.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    """Use a logarithmic y axis, and leave out values that are not positive."""
    bounds: bool = False
    """True if the values are upper bounds; their numbers are then rounded up."""

    def __post_init__(self) -> None:
        if not any(self.drawn(each) for each in self.series):
            raise ValueError(f"chart={self.title}: expected points")

    def drawn(self, series: Series) -> list[tuple[float, float]]:
        """Points of a line that can be drawn."""
        pairs = [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True)]
        finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
        return [(x, y) for x, y in finite if y > 0 or not self.log_y]

    def rows(self) -> list[tuple[str, str, str]]:
        """Some points of each line, as (name, x, y), for a table; integers are not rounded."""
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
    """The chart as an <svg> element for an HTML page that defines the variables of COLOURS."""
    import io

    with optional():
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
    """An SVG file as an element of a page, with the page's colours and without any address."""
    element = drawn[drawn.index("<svg") :]
    element = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element).replace("xlink:href", "href")
    element = re.sub(r"font-family: [^;]*; ", "", element)
    for stand_in, name in COLOURS.items():
        element = element.replace(stand_in, f"var({name})")
    head = f'<svg class="chart" role="img" aria-label="{html.escape(title)}"'
    return re.sub(r'<svg( (width|height|version)="[^"]*")*', head, element, count=1)
