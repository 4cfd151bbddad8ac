"""The training loss with noise: one Gaussian mechanism with the gradient, for no more epsilon."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedsim.clipping.step_releases import NoisyLoss
from fedsim.engine import Stats
from fedsim.keys import SecretKey

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
    stats = Stats(
        norms=np.ones(3, np.float32),
        losses=np.array([1, 0, 2], np.float32),
        dropped=np.array([False, False, True]),
        num_rows=np.array([2, 0, 1]),
    )
    assert stats.counted_losses.tolist() == [1, 2]
