"""What `fedsim budget` says of limits in words."""

import pytest

from fedsim.trust.budget_page import sentences

RUN = {"run": "a", "guarantee": True, "why_not": ""}


def said(spent, *limits, runs=1):
    left = [max(0.0, epsilon - spent) for epsilon in limits]
    return sentences(
        {
            "delta": 1e-3,
            "num_users": 150,
            "epsilon": spent,
            "epsilon_adaptive": spent,
            "sum_of_epsilons": spent,
            "limits": [
                {"epsilon": epsilon, "delta": 1e-3, "left": rest, "spent": spent}
                for epsilon, rest in zip(limits, left, strict=True)
            ],
            "runs": [RUN] * runs,
        }
    )


def test_a_limit_that_is_broken_is_no_limit_that_is_used_up():
    assert (
        "The limit is 5 at delta = 1.00e-3, and is broken already: 5.318 is spent"
        in said(5.318, 5)[2]
    )
    assert ": epsilon = 3.681 is left for one" in said(5.3185, 9)[2]
    assert ": epsilon = 0.0 is left for one" in said(5.0, 5)[2]


def test_a_later_limit_does_not_lift_an_earlier_one():
    assert not any("keep all of these limits" in line for line in said(1.0, 6))
    assert "keep all of these limits" in said(1.0, 2, 6)[-1]


@pytest.mark.parametrize(("runs", "words"), [(0, "0 runs on"), (1, "1 run on"), (2, "2 runs on")])
def test_runs_are_counted_in_words(runs, words):
    assert said(1.0, runs=runs)[0].startswith(words)
