"""Pages: what is in the HTML is in the Markdown, and no value can add markup to either."""

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt
from test_console import PLAN

from fedsim.accounting import StepEvent
from fedsim.plan.facts import Caveat, Fact
from fedsim.trust.claim import Released, facts
from fedsim.trust.report import as_html, as_markdown, escaped, svg_of_curve

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[here](https://evil.example)",
    "![here](https://evil.example/a.png)",
    "<https://evil.example>",
    "&lt;b&gt; &#60;b&#62; &amp;",
    "**bold** and _this_ and __that__ and ~~gone~~",
    "a | b",
    "`",
    "`` ` ```",
    "`code` and `| more`",
    "a\n\n# heading",
    "a\n```\n<script>alert(1)</script>\n```",
    "# heading",
    "- item",
    "---",
    "1. item",
    "> quote",
    "    four spaces",
    "{{ 7 * 7 }} {% raw %}",
    "\x1b[31m",
    "\u202egpj.exe",
)


class Read(HTMLParser):
    """Text and tags of HTML."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.pieces = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.pieces.append(data)

    @property
    def text(self):
        return " ".join("".join(self.pieces).split())


def rendered(markdown):
    """As a reader of Markdown shows it who takes HTML, links and tables, as GitHub does."""
    return Read(MarkdownIt("gfm-like", {"linkify": False}).render(markdown))


def shown(value):
    """A value with what cannot be printed escaped."""
    return value.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")


def seen(value):
    """A value as a reader should see it: backticks around code are not shown."""
    return re.sub("(?<!`)`([^`|]+)`(?!`)", r"\1", value)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("frame", ["{}", "a {} b", "> {}", "- {}", "# {}"])
def test_a_value_shows_its_text_and_nothing_else(value, frame):
    plain = rendered(frame.format("word"))
    found = rendered(frame.format(escaped(value)))
    assert [tag for tag in found.tags if tag != "code"] == plain.tags
    assert found.text == plain.text.replace("word", " ".join(seen(shown(value)).split()))


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_cell(value):
    table = "| a | b |\n| --- | --- |\n| {} | c |\n\nafter"
    found = rendered(table.format(escaped(value)))
    assert found.tags.count("td") == 2 and found.tags[-1] == "p"
    assert found.text.endswith("after") and not {"script", "img", "a"} & set(found.tags)


def report_of(*names):
    """Values of a report in which every name, path and reason is one of these."""
    every = " ".join(names)
    plan = dataclasses.replace(PLAN, non_private=[Caveat(Fact.CALLBACK, name) for name in names])
    found = Released(
        plan=plan,
        lines=[{"head": {"config_sha256": every}}, {"step": 0, "chain": every}],
        phases=[(StepEvent(1.0, 0.1), 1)],
        epsilon=1.0,
        fingerprint="f" * 64,
        run_dir=Path("run"),
        stored=None,
        checks=[SimpleNamespace(promise=every, verdict="OK", found=every, holds=True)],
    )
    own = {"title": every, "subject": every, "curve": [(0.0, 0.5), (1.00001, 2.50001e-7)]}
    own |= {"fingerprints": [(name, name) for name in names], "summary": None, "losses": []}
    return facts(found) | {"attack_bounds": [], "several": [], **own}


def page_of(*names):
    values = report_of(*names)
    picture = svg_of_curve(values["curve"], (1.0, 1e-6))
    return as_html(as_markdown("report.md.jinja", **values), values["title"], picture)


def test_a_page_with_hostile_names_has_the_tags_of_any_other():
    """Text is code in backticks here and there."""
    hostile, plain = Read(page_of(*HOSTILE)), Read(page_of(*["word"] * len(HOSTILE)))
    tags = [[t for t in each.tags if t != "code"] for each in (hostile, plain)]
    assert tags[0] == tags[1]
    assert {a[:2] for a in hostile.attributes} == {a[:2] for a in plain.attributes}
    for value in HOSTILE:
        assert " ".join(seen(shown(value)).split()) in hostile.text


def test_nothing_is_fetched_and_nothing_runs():
    """The picture is in the page; as an image, it runs no scripts either."""
    page = page_of("https")
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)"', page)
    assert len(pictures) == 1 and b"<svg" in base64.b64decode(pictures[0])
    assert page.count("src=") == 1 and not re.search(r"href=|url\(|@import|https?:", page)
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|iframe|object|svg|a)\b", page)
    assert page.count("<style") == page.count("<title") == 1
    assert page == page_of("https")  # equal values give equal bytes


@pytest.mark.privacy
def test_the_points_of_the_curve_are_rounded_up():
    assert "| 1.001 | 2.501e-7 |" in as_markdown("report.md.jinja", **report_of("word"))
