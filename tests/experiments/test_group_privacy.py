"""Group privacy by the black box: its formula holds, it is looser, and it explodes politely."""

import math

import pytest

from experiments.harness import group_privacy
from fedsim import accounting
from fedsim.accounting import StepEvent


@pytest.mark.slow
@pytest.mark.ci
def test_black_box_group_privacy():
    single = StepEvent(2.0, 0.01)
    assert group_privacy.black_box_epsilon(single, 2000, 1e-6) == pytest.approx(
        accounting.epsilon([(single, 2000)], 1e-6)
    )
    for group in (2, 8):
        event = StepEvent(2.0, 0.01, group)
        black_box = group_privacy.black_box_epsilon(event, 2000, 1e-6)
        level = black_box / group
        example_delta = accounting.delta([(single, 2000)], level)
        achieved = example_delta * math.expm1(group * level) / math.expm1(level)
        assert achieved == pytest.approx(1e-6, rel=5e-2)
        assert black_box > accounting.epsilon([(event, 2000)], 1e-6)


@pytest.mark.privacy
def test_where_the_least_level_is_enough_it_is_the_bound():
    event = StepEvent(1e6, 0.01, 2)
    found = group_privacy.black_box_epsilon(event, 1, 1e-2)
    assert 0 < found < 1e-5
    example_delta = accounting.delta([(StepEvent(1e6, 0.01), 1)], found / 2)
    assert example_delta * math.expm1(found) / math.expm1(found / 2) <= 1e-2
    assert accounting.epsilon([(event, 1)], 1e-2) <= found


def test_black_box_does_not_crash_where_it_explodes():
    assert group_privacy.black_box_epsilon(StepEvent(0.5, 0.01, 128), 2000, 1e-6) > 1e6
    assert group_privacy.black_box_epsilon(StepEvent(0.5, 0.01, 5000), 2000, 1e-6) == math.inf
