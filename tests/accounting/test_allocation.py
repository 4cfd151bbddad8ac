"""Random allocation against closed forms, integration, Monte Carlo and a bound from below."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedsim import accounting
from fedsim.accounting import StepEvent, accountant, allocated_event, allocation
from fedsim.errors import ConfigError

# Bounds on epsilon from below and above by PLD-accounting 2.0, and our epsilon; the bounds are of
# `gaussian_allocation_epsilon_configurable` with a loss_discretization of 0.005 to 0.02.
with (Path(__file__).parent / "recorded_allocations.csv").open(newline="") as file:
    RECORDED = list(csv.DictReader(file))


def window_delta(sigma, steps, epsilon, count=1):
    return accounting.delta([(allocated_event(sigma, steps), steps * count)], epsilon)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_one_step_is_the_gaussian_mechanism(sigma):
    for count, delta in ((1, 1e-5), (6, 1e-8)):
        found = accounting.epsilon([(allocated_event(sigma, 1), count)], delta)
        gaussian = accounting.epsilon([(StepEvent(sigma, 1.0), count)], delta)
        assert gaussian * (1 - 1e-4) <= found <= gaussian * (1 + 2e-3)


@pytest.mark.privacy
def test_it_lies_between_the_bounds_of_pld_accounting():
    """A table of settings with windows of 1 to 64 steps. For its grid, an answer may be above the
    other upper bound by 5e-4 of it."""
    assert len(RECORDED) >= 30
    for row in RECORDED:
        window, sigma = int(row["window"]), float(row["noise_multiplier"])
        phase = allocated_event(sigma, window), window * int(row["participations"])
        found = accounting.epsilon([phase], float(row["delta"]))
        assert float(row["lower"]) <= found <= float(row["upper"]) * (1 + 5e-4), row
        assert found == pytest.approx(float(row["epsilon"]), rel=1e-6)
        if float(row["upper"]) < 1.01 * float(row["lower"]):
            assert found <= 1.01 * float(row["lower"])


@pytest.mark.privacy
@pytest.mark.parametrize("sigma, epsilon", [(0.8, 0.2), (0.8, 2.0), (2.0, 0.2), (2.0, 1.0)])
def test_two_steps_by_integration(sigma, epsilon):
    y = np.linspace(-9 * sigma, 9 * sigma + 1, 2001)
    tilt = np.exp((y - 0.5) / sigma**2)
    ratio = (tilt[:, None] + tilt[None, :]) / 2
    mass = np.multiply.outer(*[stats.norm.pdf(y, scale=sigma) * (y[1] - y[0])] * 2)
    exact = max(
        (np.maximum(ratio - math.exp(epsilon), 0) * mass).sum(),
        (np.maximum(1 - math.exp(epsilon) * ratio, 0) * mass).sum(),
    )
    assert exact * (1 - 1e-6) <= window_delta(sigma, 2, epsilon) <= exact * (1 + 1e-2)


def sampled_losses(sigma, steps, count, rng, samples):
    """Privacy losses of REMOVE and of ADD."""
    found = []
    for shift in (1.0, 0.0):
        total = np.zeros(samples)
        for _ in range(count):
            y = rng.normal(0, sigma, (samples, steps))
            y[:, 0] += shift
            total += np.log(np.exp((y - 0.5) / sigma**2).mean(axis=1))
        found.append(total if shift else -total)
    return found


@pytest.mark.privacy
@pytest.mark.parametrize(
    "sigma, steps, count", [(0.6, 70, 1), (1.0, 5, 3), (0.9, 16, 2), (1.5, 3, 8)]
)
def test_monte_carlo_lies_at_the_bound_and_not_above(sigma, steps, count, rng):
    losses = sampled_losses(sigma, steps, count, rng, 100_000)
    for epsilon in (0.2, 0.5, 1.0, 2.0):
        claimed = window_delta(sigma, steps, epsilon, count)
        gains = [np.maximum(0, -np.expm1(epsilon - each)) for each in losses]
        means = [each.mean() for each in gains]
        error = max(each.std() for each in gains) / math.sqrt(100_000)
        assert max(means) - 4 * error <= claimed <= 1.01 * max(means) + 4 * error


@pytest.mark.parametrize("sigma, steps", [(0.4, 100), (1.0, 7), (3.0, 1000), (10.0, 37)])
def test_the_law_keeps_its_mean_and_its_mass(sigma, steps):
    law = allocation._window(sigma, steps)
    assert law.masses.sum() + law.zero == pytest.approx(1, abs=1e-11)
    mean = law.masses @ np.exp(law.points()) + law.lost
    assert mean / steps == pytest.approx(1, abs=1e-11)
    assert law.zero < 1e-16 and law.lost / steps < 1e-16
    variance = law.masses @ np.exp(2 * law.points()) / steps - steps
    assert 1 <= variance / math.expm1(1 / sigma**2) < 1.01


def test_so_little_noise_that_losses_are_too_large_for_numbers_is_refused():
    law = allocation._window(0.034, 4)  # next to what is refused
    mean = law.masses @ np.exp(law.points()) + law.lost
    assert mean == pytest.approx(4, abs=1e-10) and 670 < law.points()[-1] < 700
    with pytest.raises(ConfigError, match="noise_multiplier=0.03: expected more noise"):
        accounting.epsilon([(allocated_event(0.03, 4), 4)], 1e-6)
    assert accountant.spent([(allocated_event(0.03, 4), 4)], 1e-6, 1e-2) == math.inf
    widest = allocation.loss_range(allocation.MAX_NOISE, 1)
    assert allocation.loss_range(1e9, 1) == widest  # a finer grid would not fit into memory
    few = {"epsilon": 1000.0, "delta": 1e-6, "num_steps": 4}  # calibration comes past these
    assert 0.03 < accounting.calibrate_noise(lambda sigma: allocated_event(sigma, 4), **few) < 0.034


def test_a_user_is_one_unit():
    with pytest.raises(ConfigError, match="max_contributions=2: expected 1, and no others"):
        StepEvent(1.0, 1.0, 2, 5, allocated=True)
    with pytest.raises(ConfigError, match="sampling_prob=0.5: expected 1 with random allocation"):
        StepEvent(1.0, 0.5, 1, 5, allocated=True)
