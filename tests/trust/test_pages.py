"""Pages: what is in the HTML is in the Markdown, and no value can add markup to either."""

import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from fedsim.trust.pages import Chart, Series, as_html, as_markdown, escaped, fenced

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[here](https://evil.example)",
    "![here](https://evil.example/a.png)",
    "<https://evil.example>",
    "[a]: https://evil.example",
    "&lt;b&gt; &#60;b&#62; &amp;",
    "**bold** and _this_ and __that__ and ~~gone~~",
    "a_b_c 1_000 __init__",
    "a | b",
    "a\\",
    "\\<b>",
    "`",
    "`` ` ```",
    "`a`` `b",
    "`code` and `| more`",
    "```figure",
    "a\n\n# heading",
    "a\n```\n<script>alert(1)</script>\n```",
    "# heading",
    "#",
    "- item",
    "-",
    "+ item",
    "* item",
    "---",
    "===",
    "1. item",
    "12) item",
    "> quote",
    "    four spaces",
    "\ttab",
    "{{ 7 * 7 }} {% raw %}",
    "$x^2$",
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


@pytest.mark.parametrize("value", HOSTILE)
def test_commands_stay_in_their_block(value):
    found = rendered(f"{fenced(['first', value])}\n\nafter")
    assert found.tags == ["pre", "code", "p"]
    assert shown(value).split() == "".join(found.pieces).split()[1:-1]


def audit_of(*names):
    replaced = [dict.fromkeys(("setting", "given", "used", "why"), name) for name in names]
    every = " ".join(names)
    return {
        "title": every,
        "sentence": every,
        "attacks": {},
        "independent": None,
        "noise": None,
        "shared": False,
        "replaced": replaced,
        "charts": [Chart(every, every, "y", [Series(every, [0, 1, 2], [1.0, 2.5, 4.25])] * 2)],
    }


def test_a_page_with_hostile_names_has_the_tags_of_any_other():
    """Text is code in backticks here and there; a chart lays its text out as it is long."""
    hostile = Read(as_html("audit.md.jinja", **audit_of(*HOSTILE)))
    plain = Read(as_html("audit.md.jinja", **audit_of(*["word"] * len(HOSTILE))))
    tags = [[t for t in each.tags if t != "code"] for each in (hostile, plain)]
    assert tags[0] == tags[1]
    assert {a[:2] for a in hostile.attributes} == {a[:2] for a in plain.attributes}
    for value in HOSTILE:
        assert " ".join(seen(shown(value)).split()) in hostile.text


def test_nothing_is_fetched_and_nothing_runs():
    page = as_html("audit.md.jinja", **audit_of("https"))
    assert not re.search(r"src=|href=(?!\"#)|url\((?!#)|@import|https?:", page)
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    assert not re.search(r"<(script|link|iframe|object|img|a)\b", page)
    assert page.count("<style") == page.count("<title") == 1 and page.count("<svg") == 1


def budget_of(chart):
    facts = {"title": "t", "sentences": ["s"], "head": ("a", "b"), "rows": [("1", "x|y")]}
    return as_markdown("budget.md.jinja", **facts, course=chart)


@pytest.mark.privacy
def test_the_numbers_of_a_chart_of_bounds_are_rounded_up_and_counts_are_whole():
    series = Series("l", [123_456, 1.00001], [3.99931, 2.50001])
    text = budget_of(Chart("c", "x", "y", [series], bounds=True))
    assert "| l | 123456 | 4.000 |" in text and "| l | 1.001 | 2.501 |" in text
