"""Calibration: the target is met and hardly more, what was found is kept in the process alone."""

import dataclasses

import pytest

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, calibration

CALIBRATIONS = [
    dict(epsilon=4.0, delta=1e-6, num_steps=100, sampling_prob=0.02, max_contributions=16),
    dict(epsilon=0.001, delta=1e-6, num_steps=1000, sampling_prob=0.01),
    dict(epsilon=500.0, delta=1e-6, num_steps=1000, sampling_prob=0.01, max_contributions=32),
    dict(epsilon=1.0, delta=1e-3, num_steps=1, sampling_prob=1.0, max_contributions=2),
    dict(epsilon=4, delta=1.13e-9, num_steps=10000, sampling_prob=2.3e-5, max_contributions=128),
]


@pytest.mark.parametrize("target", CALIBRATIONS, ids=str)
def test_calibrated_noise_meets_the_target_and_hardly_more(target):
    sigma = accounting.noise_multiplier(**target)
    event = StepEvent(sigma, target["sampling_prob"], target.get("max_contributions", 1))

    def spent(factor):
        scaled = dataclasses.replace(event, noise_multiplier=sigma * factor)
        return accounting.epsilon([(scaled, target["num_steps"])], target["delta"])

    assert spent(1.0) <= target["epsilon"]
    assert spent(1 - 1e-3) > target["epsilon"]


def test_the_same_noise_is_searched_for_once(monkeypatch):
    """And any other argument is another search."""
    calls = []
    monkeypatch.setattr(calibration, "_found", {})
    monkeypatch.setattr(calibration, "calibrate", lambda *args: calls.append(args) or len(calls))
    target = dict(epsilon=2.0, delta=1e-5, num_steps=10, sampling_prob=0.1)
    assert accounting.noise_multiplier(**target) == accounting.noise_multiplier(**target) == 1
    others = {"epsilon": 2.1, "delta": 1e-6, "num_steps": 11, "sampling_prob": 0.2}
    others |= {"max_contributions": 2, "max_changed": 1, "before": [(PureEvent(0.5), 1)]}
    found = [accounting.noise_multiplier(**{**target, name: x}) for name, x in others.items()]
    assert found == [*range(2, 2 + len(others))]


@pytest.mark.privacy
def test_nothing_that_is_calibrated_is_on_a_disk(tmp_path, monkeypatch):
    """Whoever can write there would decide the noise."""
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path))
    accounting.noise_multiplier(epsilon=2.5, delta=1e-5, num_steps=10, sampling_prob=0.1)
    assert accounting.gaussian_mu([(StepEvent(3.25, 0.5), 2)], 1e-7) > 0
    assert not list(tmp_path.iterdir())
