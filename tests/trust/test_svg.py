"""Charts: every point is inside, the axes hold all values, and the markup is well-formed."""

import itertools
from xml.etree import ElementTree

import pytest

from fedsim.trust import svg
from fedsim.trust.svg import Chart, Series


def chart(*series, **options):
    return Chart("a <title> & more", "x & y", "<y>", [Series(*each) for each in series], **options)


def drawn(chart):
    """(the element, points of each line)."""
    text, _, _ = svg.svg(chart).partition("<ul")
    element = ElementTree.fromstring(text)
    paths = [p.get("d") for p in element.iter("path") if "line" in p.get("class").split()]
    return element, [[tuple(map(float, p.split())) for p in d[1:].split("L")] for d in paths]


@pytest.mark.parametrize(
    "x, y",
    [
        ([0, 1, 2], [0, 1, 4]),
        ([5], [7]),
        ([0, 1], [-3, 3]),
        ([1, 1e6], [1e-9, 1e9]),
        ([0, 1], [2, 2]),
    ],
)
def test_every_point_lies_within_the_axes(x, y):
    _, (points,) = drawn(chart(("a", x, y)))
    assert len(points) == len(x)
    for px, py in points:
        assert svg.LEFT <= px <= svg.WIDTH - svg.RIGHT
        assert svg.TOP <= py <= svg.HEIGHT - svg.BOTTOM


def test_larger_is_further_right_and_higher():
    _, (points,) = drawn(chart(("a", [1, 2, 4], [1, 3, 9])))
    assert [p[0] for p in points] == sorted(p[0] for p in points)
    assert [p[1] for p in points] == sorted((p[1] for p in points), reverse=True)
    (a, b, c) = points
    assert (c[0] - b[0]) == pytest.approx(2 * (b[0] - a[0]), abs=0.2)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors_and_no_zeros():
    _, (points,) = drawn(chart(("a", [0, 1, 2, 3], [1, 0, 0.1, 0.01]), log_y=True))
    assert len(points) == 3
    (_, a), (_, b), (_, c) = points
    assert c - b == pytest.approx(b - a, abs=0.2)


def test_names_are_escaped_and_named_in_a_legend_if_there_are_several():
    element, lines = drawn(chart(("a", [0, 1], [0, 1]), ("<b>", [0, 1], [1, 0])))
    assert len(lines) == 2 and element.get("aria-label") == "a <title> & more"
    assert "&lt;b&gt;" in svg.svg(chart(("a", [0], [0]), ("<b>", [1], [1])))
    assert "legend" not in svg.svg(chart(("a", [0], [0])))


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0, 100), (3, 3), (-7, 7), (0.001, 0.0013), (0, 3e9)]
)
def test_ticks_are_few_and_round_and_hold_the_range(low, high):
    ticks = svg._ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= svg.MOST_TICKS + 2
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps)) and f"{steps[0]:.0e}"[0] in "125"


@pytest.mark.parametrize("y", [[], [float("nan")], [float("inf")]])
def test_a_chart_of_nothing_is_refused(y):
    with pytest.raises(ValueError, match="expected points"):
        chart(("a", [0] * len(y), y))
