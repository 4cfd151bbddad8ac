"""Pages from templates: Markdown by Jinja2, and the same as one HTML file by markdown-it-py.

Templates are Markdown. Values in them are text: possible markup is escaped, so that no name, path
or setting adds a heading, a link or a script; code in a value's backticks stays code. The HTML page
has one style sheet, and no scripts, links or fetched files; below the text it has a picture of the
curve of epsilon and delta, drawn as SVG by matplotlib.

Jinja2, markdown-it-py and matplotlib are imported when a page is made, so that no command waits for
them. Equal values give equal bytes.
"""

import base64
import functools
import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.errors import printable

TEMPLATES = Path(__file__).parent / "templates"
CODE = re.compile(r"(?<!`)(`[^`|]+`)(?!`)")
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
AT_START = re.compile(r"^(\d*)([#+=.)-])(?=[#+=-]*(?:\s|$))")
"""The start of a value that Markdown would read as a list, a heading or a rule."""
STYLE = {"axes.grid": True, "svg.hashsalt": "fedsim"}  # the same bytes each time


def as_markdown(template: str, **facts: Any) -> str:
    """The page as Markdown."""
    return _environment().get_template(template).render(**facts)


def as_html(markdown: str, title: str, picture: bytes | None = None) -> str:
    """The page as one HTML file.

    Args:
      markdown: made by `as_markdown`.
      picture: SVG.
    """
    page = _environment().get_template("page.html.jinja")
    shown = {"title": html.escape(printable(title, kept="")), "body": _parser().render(markdown)}
    if picture is not None:
        shown["picture"] = base64.b64encode(picture).decode()
    return page.render({name: Markup(text) for name, text in shown.items()})


def svg_of_curve(epsilons: Sequence[float], deltas: Sequence[float]) -> bytes:
    """A picture of delta at each epsilon: an SVG file."""
    import matplotlib.style
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.semilogy(epsilons, deltas)
        axes.set(xlabel="epsilon", ylabel="delta (logarithmic)")
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=unsigned)
    return file.getvalue()


def escaped(value: Any) -> Markup:
    """A value as one line of Markdown that shows exactly its text."""
    if isinstance(value, Markup):  # written by a template or a macro
        return value
    text = printable(" ".join(str(value).split()), kept="")
    parts = CODE.split(text)  # code is at odd indices
    parts[::2] = [MARKUP.sub(r"\\\g<0>", html.escape(each, quote=False)) for each in parts[::2]]
    return Markup(AT_START.sub(r"\1\\\2", "".join(parts)))


def fenced(lines: Iterable[str]) -> Markup:
    """Commands as a block of code, with a fence longer than any backticks in them."""
    text = printable("\n".join(lines), kept="\n\t")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}sh\n{text}\n{fence}")


@functools.cache
def _environment() -> Any:
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
    made.filters |= {"at_most": at_most, "at_least": at_least, "commas": "{:,}".format}
    made.filters |= {"fenced": fenced, "code": lambda value: escaped(f"`{value}`")}
    made.filters["one_line"] = lambda text: Markup(" ".join(text.split()))
    return made


@functools.cache
def _parser() -> Any:
    """A parser of Markdown without HTML, links or images, so that no value can add them."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.disable(["link", "image", "autolink", "reference", "html_block", "html_inline"])

    made.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return made
