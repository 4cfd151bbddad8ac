"""Forecasts: the curve and its interval."""

import math

import numpy as np
import pytest

from experiments.harness.forecasts import PROBES, Curve, Probe
from fedsim.errors import FedsimError

SIGNALS = np.geomspace(0.5, 40, PROBES)


def read_off(gains):
    return Curve.fit([Probe(x, 16, gain) for x, gain in zip(SIGNALS, gains, strict=True)])


def test_a_curve_is_read_off_exactly_where_there_is_no_noise():
    curve = read_off(0.1 + 0.2 * np.log(SIGNALS) + 0.03 * np.log(SIGNALS) ** 2 / 10)
    assert curve.residual < 1e-12 and curve.freedom == PROBES - 3
    assert curve.at(3.0) == pytest.approx([0.1 + 0.2 * math.log(3) + 0.003 * math.log(3) ** 2] * 3)


@pytest.mark.parametrize("square", [-0.05, 0.05])
def test_more_signal_never_gains_less(square):
    curve = read_off(0.3 + square * np.log(SIGNALS / 4) ** 2)
    gains = [curve.at(x)[0] for x in np.geomspace(0.1, 100, 50)]
    assert (np.diff(gains) >= -1e-12).all() and np.ptp(gains) > 0.05


def test_intervals_hold_as_often_as_they_say(rng):
    truth = lambda x: 0.1 + 0.12 * np.log(x)  # noqa: E731
    inside = 0
    for _ in range(2000):
        curve = read_off(truth(SIGNALS) + rng.normal(0, 0.02, PROBES))
        _, low, high = curve.at(7.0)
        inside += low <= truth(7.0) + rng.normal(0, 0.02) <= high
    assert 0.935 < inside / 2000 < 0.965


def test_trainings_that_diverged_are_left_out_while_enough_are_there():
    gains = 0.1 * np.log(SIGNALS)
    assert read_off([math.nan, *gains[1:]]).at(4.0)[0] == pytest.approx(0.1 * math.log(4))
    with pytest.raises(FedsimError, match=f"^forecast: 4 of {PROBES} trainings diverged$"):
        read_off([math.nan] * 4 + [*gains[4:]])
