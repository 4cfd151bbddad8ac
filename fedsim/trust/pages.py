"""Pages from templates: Markdown by Jinja2, and the same as one HTML file by markdown-it-py.

Templates are Markdown. Values in them are text: possible markup is escaped, so that no name, path
or setting adds a heading, a link or a script; code in a value's backticks stays code. The HTML page
has one style sheet, and no scripts, links or fetched files. A chart is a picture in HTML, drawn as
SVG by matplotlib, and a table of its points in Markdown.

Jinja2, markdown-it-py and matplotlib are imported when a page is made, so that no command waits for
them. Equal values give equal bytes.
"""

import base64
import dataclasses
import functools
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.errors import brief, printable

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
SIZE = 5.6, 3.5  # inches of 72 points: about the width of a phone, so that text is legible there
POINTS_IN_TABLE = 12
STYLE = {
    "axes.grid": True,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal sizes everywhere
    "svg.hashsalt": "fedsim",  # the same bytes each time
    "text.parse_math": False,
}


def as_markdown(template: str, **facts: Any) -> str:
    """The page as Markdown, with a table of points for each chart."""
    return _render(template, **facts, figure=None)


def as_html(template: str, **facts: Any) -> str:
    """The page as one HTML file, with a picture for each chart."""
    charts: list[Chart] = []

    def figure(chart: Chart) -> Markup:
        charts.append(chart)
        return Markup(f"```{FIGURE}\n{len(charts) - 1}\n```\n")

    text = _render(template, **facts, figure=figure)
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
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.disable(["link", "image", "autolink", "reference", "html_block", "html_inline"])

    def fence(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        if token.info != FIGURE:
            return f"<pre>{html.escape(token.content)}</pre>\n"
        chart = env["charts"][int(token.content)]
        title, picture = html.escape(chart.title), base64.b64encode(svg(chart)).decode()
        caption = f"<figcaption>{title}</figcaption>"
        image = f'<img alt="{title}" src="data:image/svg+xml;base64,{picture}">'
        return f"<figure>{caption}{image}</figure>\n"

    made.add_render_rule("fence", fence)
    made.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return made


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a chart: its name and points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines of upper bounds, with a title and labels of the axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    """Use a logarithmic y axis, and leave out values that are not positive."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Some points of each line, as (name, x, y), rounded up but for integers, for a table."""

        def shown(value: float) -> str:
            return str(value) if isinstance(value, int) else at_most(value, ".4g")

        rows, parts = [], range(POINTS_IN_TABLE + 1)
        for line in self.series:
            last = len(line.x) - 1
            places = sorted({round(part * last / POINTS_IN_TABLE) for part in parts})
            rows += [(line.name, shown(line.x[i]), shown(line.y[i])) for i in places]
        return rows


def svg(chart: Chart) -> bytes:
    """The chart as an SVG file: equal charts give equal bytes."""
    import io

    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for line in chart.series:
            pairs = zip(line.x, line.y, strict=True)
            shown = [(x, y) for x, y in pairs if y > 0 or not chart.log_y]
            if shown:
                style = "--" if line.dashed else "-"
                axes.plot(*zip(*shown, strict=True), style, label=brief(line.name))
        axes.set(xlabel=brief(chart.x_label), ylabel=brief(chart.y_label))
        if chart.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if len(chart.series) > 1:
            figure.legend(loc="outside upper left", ncols=2)
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=unsigned)
    return file.getvalue()
