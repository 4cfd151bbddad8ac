"""One content, two forms: what is in the page is in the Markdown, and nothing can break out."""

import re

import pytest

from fedsim.trust.document import Code, Document, Items, Quote, Section, Table, to_html, to_markdown
from fedsim.trust.svg import Chart, Series

EVIL = "<script>alert(1)</script> & | `x`"
PAGE = Document(
    EVIL,
    [
        Section(
            EVIL,
            [
                EVIL,
                Quote(EVIL),
                Items([EVIL, "second"]),
                Code("a < b"),
                Table(("h|1", EVIL), [("c", EVIL)]),
                Chart("points", "x", "y", [Series("s", [0, 1, 2], [1.0, 2.5, 4.25])]),
            ],
        )
    ],
)


def test_nothing_is_fetched_and_nothing_runs():
    page = to_html(PAGE)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import|https?:", page)
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    assert page.count("<section>") == page.count("</section>") == 1


def test_backticks_are_code():
    assert "<code>x</code>" in to_html(PAGE)


def test_markdown_has_the_same_and_tables_keep_their_columns():
    text = to_markdown(PAGE)
    assert text.startswith("# <script>") and "- second" in text and "```sh\na < b\n```" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows[:3]} == {3}
    assert "| s | 2 | 4.25 |" in rows


def test_a_long_chart_is_a_short_table():
    many = list(range(1000))
    text = to_markdown(
        Document("t", [Section("s", [Chart("c", "x", "y", [Series("l", many, many)])])])
    )
    rows = [line for line in text.splitlines() if line.startswith("| l ")]
    assert len(rows) == 13 and rows[0] == "| l | 0 | 0 |" and rows[-1] == "| l | 999 | 999 |"


@pytest.mark.privacy
def test_the_numbers_of_a_chart_of_bounds_are_rounded_up_and_counts_are_whole():
    series = Series("l", [123_456, 1.00001], [3.99931, 2.50001])
    page = Document("t", [Section("s", [Chart("c", "x", "y", [series], bounds=True)])])
    text = to_markdown(page)
    assert "| l | 123456 | 4.000 |" in text and "| l | 1.001 | 2.501 |" in text
