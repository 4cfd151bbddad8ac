"""Releases beside the gradient: their cost by dp_accounting, and what they are of a step."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.engine import Stats
from fedsim.keys import SecretKey
from fedsim.mechanism import LARGEST, SMALLEST, AdaptiveClip, NoisyLoss


def following(clip, norm, norms, rng):
    """The clip norm of the next step, after units of these norms."""
    return clip.release(norm, SimpleNamespace(counted_norms=norms), rng)["clip_norm"]


@pytest.mark.parametrize("z, count", [(0.6, 16), (0.6, 5000), (1.5, 200), (4.0, 10)])
def test_both_releases_together_cost_what_the_step_is_accounted_at(z, count):
    """dp_accounting on the two Gaussians of one draw, against the one event that is recorded."""
    clip = AdaptiveClip(0.5, count, z)
    pair = [
        dp_event.GaussianDpEvent(clip.gradient_noise_multiplier),
        dp_event.GaussianDpEvent(2 * clip.count_stddev),  # sensitivity 1/2
    ]

    def rdp(event):
        step = dp_event.PoissonSampledDpEvent(0.05, event)
        return RdpAccountant().compose(dp_event.SelfComposedDpEvent(step, 80)).get_epsilon(1e-6)

    together = rdp(dp_event.ComposedDpEvent(pair))
    assert together == pytest.approx(rdp(dp_event.GaussianDpEvent(z)), rel=1e-9)
    assert accounting.epsilon([(StepEvent(z, 0.05), 80)], 1e-6) < together  # RDP is looser
    assert together > rdp(pair[0])


@pytest.mark.parametrize("z, count", [(0.6, 16), (2.0, 64), (8.0, 4096)])
def test_the_gradient_gets_at_most_one_percent_more_noise(z, count):
    clip = AdaptiveClip(0.5, count, z)
    assert z < clip.gradient_noise_multiplier <= 1.01 * z
    assert clip.count_stddev >= count / 20


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_it_settles_at_the_quantile(quantile, rng):
    clip, norm, path = AdaptiveClip(quantile, 200, 1.0), 0.01, []
    for _ in range(400):
        cohort = rng.binomial(4000, 0.05)  # as Poisson sampling draws them
        norm = following(clip, norm, rng.lognormal(0.0, 0.5, cohort), rng)
        path.append(norm)
    settled = np.exp(np.mean(np.log(path[-200:])))
    from scipy import stats

    assert stats.lognorm(0.5).cdf(settled) == pytest.approx(quantile, abs=0.04)


def test_the_count_is_released_with_its_noise(rng):
    clip, norms = AdaptiveClip(0.5, 40, 2.0), np.full(40, 2.0)  # nobody within 1
    moved = [math.log(following(clip, 1.0, norms, rng)) for _ in range(2000)]
    assert np.std(moved) == pytest.approx(0.2 * clip.count_stddev / 40, rel=0.1)


@pytest.mark.parametrize("noise_multiplier", [100.0, 2000.0])  # by the latter it moves by e^3500
def test_the_norm_stays_where_float32_can_hold_it(noise_multiplier, rng):
    clip = AdaptiveClip(0.5, 1, noise_multiplier)
    low, high = SMALLEST, LARGEST
    for _ in range(50):
        low, high = following(clip, low, np.zeros(0), rng), following(clip, high, np.zeros(0), rng)
        assert SMALLEST <= low <= LARGEST and SMALLEST <= high <= LARGEST


LOSS = NoisyLoss(bound=5.0, count=40, noise_multiplier=2.0)


def released(losses, step=0, loss=LOSS):
    stats = SimpleNamespace(counted_losses=np.asarray(losses, np.float32))
    return loss.release(1.0, stats, SecretKey.create(1).generator("loss", step))["loss"]


@pytest.mark.privacy
def test_noise_and_mean_are_what_is_said():
    losses = np.full(40, 1.0)
    found = np.array([released(losses, step) for step in range(2000)])
    stddev = LOSS.stddev * 2.5 / 40
    assert abs(found.mean() - 1.0) < 5 * stddev / math.sqrt(2000)
    assert found.std() == pytest.approx(stddev, rel=0.1)


@pytest.mark.privacy
@pytest.mark.parametrize("extreme", [0.0, 5.0, 1e9, -1e9, math.nan, math.inf, -math.inf])
def test_a_unit_moves_it_by_half_of_the_bound_whatever_its_loss(extreme):
    losses = np.linspace(0.1, 1.0, 39)
    moved = released([*losses, extreme]) - released(losses)
    cell = 2.0**-8 * LOSS.stddev * 2.5 / 40
    assert abs(moved) <= 2.5 / 40 + 2 * cell
    sign = -1 if extreme <= 0 else 1  # nan counts as the bound, as a diverged loss should
    assert sign * moved >= 2.5 / 40 - 2 * cell


@pytest.mark.privacy
def test_a_unit_without_rows_adds_nothing():
    losses, num_rows = np.float32([1, 0, 2]), np.array([2, 0, 1])
    stats = Stats(np.ones(3, np.float32), losses, np.array([False, False, True]), num_rows)
    assert stats.counted_losses.tolist() == [1, 2]
