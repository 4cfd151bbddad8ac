"""Adaptive clipping: what it costs by dp_accounting, where it goes, and through training."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.clipping.step_releases import LARGEST, SMALLEST, AdaptiveClip


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


def test_for_els_a_user_with_k_examples_moves_the_pair_by_at_most_k_over_z(rng):
    """What Theorem 1 accounts: k contributions, each of norm 1 in units of the step's noise."""
    z, clip = 1.3, AdaptiveClip(0.5, 40, 1.3)
    for k in (1, 3, 12):
        gradients = rng.normal(size=(k, 5))
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)  # clipped, sensitivity 1
        bits = rng.choice([-0.5, 0.5], k)
        moved = np.append(
            gradients.sum(axis=0) / clip.gradient_noise_multiplier, bits.sum() / clip.count_stddev
        )
        assert np.linalg.norm(moved) <= k / z * (1 + 1e-12)


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


def test_without_noise_it_is_the_share_within_the_norm(rng):
    clip = AdaptiveClip(0.5, 4, 0.0)
    assert clip.gradient_noise_multiplier == clip.count_stddev == 0
    norms = np.array([0.5, 2.0, 2.0, math.inf])  # a quarter within
    assert following(clip, 1.0, norms, rng) == pytest.approx(math.exp(-0.2 * (0.25 - 0.5)))
    assert following(clip, 1.0, np.full(4, math.nan), rng) > 1.0  # not within
    assert following(clip, 1.0, np.zeros(0), rng) == 1.0  # an empty draw says nothing


def test_one_unit_moves_the_count_by_one_half(rng):
    clip = AdaptiveClip(0.5, 10, 0.0)
    norms = np.array([0.5, 2.0, 1.0])
    steps = [
        math.log(following(clip, 1.0, some, rng)) for some in (norms, norms[:2], norms[[0, 2]])
    ]
    assert np.abs(np.diff(steps)).max() <= 2 * 0.2 * 0.5 / 10 + 1e-12


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
