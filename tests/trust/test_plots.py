"""Charts: every point is inside the axes, and equal charts give equal bytes."""

import re
from xml.etree import ElementTree

import pytest

from fedsim.trust.pages import COLOURS, Chart, Series, svg


def chart(*series, **options):
    return Chart("a <title> & more", "x & y", "<y>", [Series(*each) for each in series], **options)


def drawn(chart):
    """(the element, its texts, points of each line, the axes' (left, right, top, bottom))."""
    element = ElementTree.fromstring(svg(chart))
    paths = [(p.get("style"), p.get("d")) for p in element.iter("path") if p.get("style")]
    lines = [points(d) for style, d in paths if re.search(r"stroke: var\(--[abc]\)", style)]
    (frame,) = element.iter("rect")
    left, top, width, height = (float(frame.get(n)) for n in ("x", "y", "width", "height"))
    texts = ["".join(t.itertext()) for t in element.iter("text")]
    edges = left - 1e-3, left + width + 1e-3, top - 1e-3, top + height + 1e-3
    return element, texts, lines, edges


def points(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", path)]


@pytest.mark.parametrize(
    "x, y",
    [
        ([0, 1, 2], [0, 1, 4]),
        ([0, 1], [-3, 3]),
        ([1, 1e6], [1e-9, 1e9]),
        ([0, 1], [2, 2]),
    ],
)
def test_every_point_lies_within_the_axes(x, y):
    _, _, (line,), (left, right, top, bottom) = drawn(chart(("a", x, y)))
    assert len(line) == len(x)
    for px, py in line:
        assert left <= px <= right and top <= py <= bottom


def test_larger_is_further_right_and_higher_from_zero_on():
    _, texts, (line,), _ = drawn(chart(("a", [1, 2, 4], [11, 13, 19])))
    assert [p[0] for p in line] == sorted(p[0] for p in line)
    assert [p[1] for p in line] == sorted((p[1] for p in line), reverse=True)
    (a, b, c) = line
    assert (c[0] - b[0]) == pytest.approx(2 * (b[0] - a[0]), abs=0.2)
    assert (b[1] - c[1]) == pytest.approx(3 * (a[1] - b[1]), abs=0.2)
    assert "0.0" in texts


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors_and_no_zeros():
    _, texts, (line,), _ = drawn(chart(("a", [0, 1, 2, 3], [1, 0, 0.1, 0.01]), log_y=True))
    assert len(line) == 3 and {"1e0", "1e-1", "1e-2"} <= set(texts)
    (_, a), (_, b), (_, c) = line
    assert c - b == pytest.approx(b - a, abs=0.2)


def test_names_are_text_and_lines_are_named_if_there_are_several():
    two = chart(("$a_1$", [0, 1], [0, 1]), ("<b>", [0, 1], [1, 0]))
    element, texts, lines, _ = drawn(two)
    assert {"$a_1$", "<b>", "x & y", "<y>"} <= set(texts)
    assert element.get("aria-label") == "a <title> & more"
    assert len(lines) == 4  # with those of the legend
    assert "a" not in drawn(chart(("a", [0, 1], [0, 1])))[1]


def test_steps_are_counted_in_whole_numbers():
    _, texts, _, _ = drawn(chart(("a", [1, 2], [0.5, 1.5])))
    along = texts[: texts.index("x & y")]
    assert along == ["1", "2"]


@pytest.mark.parametrize("y", [[], [float("nan")], [float("inf")]])
def test_a_chart_of_nothing_is_refused(y):
    with pytest.raises(ValueError, match="expected points"):
        chart(("a", [0] * len(y), y))


def test_a_single_point_is_seen_and_what_is_infinite_is_left_out():
    assert "var(--a)" in re.findall("<use.*?>", svg(chart(("a", [5], [7]))))[-1]
    assert "var(--a)" not in "".join(re.findall("<use.*?>", svg(chart(("a", [5, 6], [7, 7])))))
    _, _, (line,), _ = drawn(chart(("a", [0, 1, 2], [1.0, 2.0, float("inf")])))
    assert len(line) == 2


def test_equal_charts_give_equal_bytes_whatever_was_drawn_or_set_before(monkeypatch):
    import matplotlib

    lines = [("a", [0, 1], [0.5, 1]), ("b", [0, 1], [1, 0.5], True)]
    first = svg(chart(*lines))
    svg(chart(("another", [0, 1], [1, 2])))
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 7)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 3)
    assert svg(chart(*lines)) == first and matplotlib.rcParams["font.size"] == 3
    assert not re.search(r"\d{4}-\d\d-\d\d|matplotlib|https?:", first)
    assert not any(stand_in in first for stand_in in COLOURS)
    assert not re.search("#[0-9a-f]{6}", first.replace('href="#', ""))
