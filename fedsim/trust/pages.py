"""Pages from templates: Markdown by Jinja2, and the same as one HTML file by markdown-it-py.

What a template writes is Markdown. Every value that is put into it is text: whatever could become
markup is escaped, so that no name, path or setting adds a heading, a link or a script; `code` in
a value's backticks stays code. The HTML page has one style sheet, light or dark as the reader's
system is, and neither scripts nor links nor anything fetched. A chart is a picture in HTML and a
table of its points in Markdown.
"""

import functools
import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.errors import printable
from fedsim.files import make_place, write_atomically
from fedsim.trust.plots import Chart, svg

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
