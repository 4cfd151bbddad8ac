"""A page of text, tables and charts, written once and shown as HTML or as Markdown.

The HTML is one file: no script, nothing fetched, light or dark as the reader's system is, and as
wide as the screen. In Markdown a chart is a table of its points. In texts, `backticks` mark code.
"""

import dataclasses
import html
import re
from collections.abc import Sequence

from fedsim.accounting.rounding import at_most
from fedsim.trust.svg import Chart, svg

POINTS_IN_MARKDOWN = 12


@dataclasses.dataclass(frozen=True)
class Quote:
    """A sentence to be quoted by itself."""

    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    """Texts as a list, a point for each."""

    texts: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Code:
    """Commands, a line each."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Quote | Items | Code | Table | Chart


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True)
class Document:
    """A title and sections."""

    title: str
    sections: Sequence[Section]


STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5b6169;--page:#fff;--box:#f4f5f7;--rule:#d5d9de;
--a:#0b63c4;--b:#b35309}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#a2a9b2;--page:#15171a;--box:#1f2327;
--rule:#3a4047;--a:#6db3ff;--b:#f0a35e}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:46rem;margin:0 auto;padding:1.2rem 1rem 4rem}
h1{font-size:1.6rem;line-height:1.25;margin:.4rem 0 1rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--rule)}
blockquote{margin:1rem 0;padding:.9rem 1.1rem;background:var(--box);border-left:4px solid var(--a);
font-size:1.08rem;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.94rem;margin:.6rem 0}
th,td{text-align:left;vertical-align:top;padding:.4rem .7rem .4rem 0;
border-bottom:1px solid var(--rule);overflow-wrap:break-word}
td code,td:last-child{overflow-wrap:anywhere}
th{color:var(--soft);font-weight:600}
td:first-child{min-width:7.5rem}
pre,code{font:.88rem/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
pre{background:var(--box);padding:.8rem 1rem;white-space:pre-wrap}
figure{margin:1.2rem 0}
figcaption{color:var(--soft);font-size:.92rem}
.chart{width:100%;max-width:35rem;height:auto;display:block}
.chart text{fill:var(--ink);font:12px system-ui,sans-serif}
.axis{stroke:var(--soft);fill:none}
.grid{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:2;stroke:var(--a)}
.line-1{stroke:var(--b)}
.dashed{stroke-dasharray:5 4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0;margin:.3rem 0}
.key{display:inline-block;width:1.4rem;height:.2rem;margin-right:.4rem;vertical-align:middle;
background:var(--a)}
.key-1{background:var(--b)}
"""


def to_html(document: Document) -> str:
    """The whole page."""
    title = html.escape(document.title)
    body = [f"<h1>{title}</h1>"]
    for section in document.sections:
        body.append(f"<section><h2>{html.escape(section.title)}</h2>")
        body += [_html(block) for block in section.blocks]
        body.append("</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def to_markdown(document: Document) -> str:
    """The same as Markdown."""
    parts = [f"# {document.title}"]
    for section in document.sections:
        parts.append(f"## {section.title}")
        parts += [_markdown(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def as_text(table: Table) -> str:
    """A table for the terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{_inline(block)}</p>"
    if isinstance(block, Quote):
        return f"<blockquote>{_inline(block.text)}</blockquote>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text)}</pre>"
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{_inline(text)}</li>' for text in block.texts)}</ul>"
    if isinstance(block, Chart):
        caption = f"<figcaption>{html.escape(block.title)}</figcaption>"
        return f"<figure>{caption}{svg(block)}</figure>"
    head = "".join(f"<th>{_inline(text)}</th>" for text in block.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_inline(text)}</td>' for text in row)}</tr>" for row in block.rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Quote):
        return f"> {block.text}"
    if isinstance(block, Code):
        return f"```sh\n{block.text}\n```"
    if isinstance(block, Items):
        return "\n".join(f"- {text}" for text in block.texts)
    if isinstance(block, Chart):
        return f"*{block.title}*\n\n" + _markdown(_points(block))
    rows = [block.head, ["---"] * len(block.head), *block.rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in row)} |" for row in rows)


def _points(chart: Chart) -> Table:
    """Some of a chart's points; the series share their x or follow one another."""
    rows, shown = [], at_most if chart.bounds else format
    for each in chart.series:
        count = len(each.x)
        some = sorted({round(i * (count - 1) / POINTS_IN_MARKDOWN) for i in range(13)})
        for i in some:  # what is counted is shown as it is
            pair = each.x[i], each.y[i]
            cells = (str(v) if isinstance(v, int) else shown(v, ".4g") for v in pair)
            rows.append((each.name, *cells))
    return Table(("line", chart.x_label, chart.y_label), rows)


def _inline(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
