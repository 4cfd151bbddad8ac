"""Estimates of `recommend` with noise: histograms of users' sizes and of gradient norms.

Bins are octaves or half octaves, the same whatever the data. Each user is in one bin at most:

- sizes: the number of a user's examples, of all users, once;
- norms: of a user's mean gradient over at most G examples, for each of `count` group sizes, of
  users drawn by Poisson sampling with probability q, anew for each.

So one user, with all texts or with none, changes one count of a histogram by 1, and each histogram
is a Gaussian mechanism of sensitivity 1: sigma / q for the sizes, and Poisson sampled with sigma
for the norms, so that all have the same noise relative to the number of users. They are composed as
the steps of a training are, and all are paid for before the first is drawn, whichever are used.
What is computed from them costs nothing more. L_ELS is taken as L_ULS(1): an example of each user.

How many users there are is taken as known, also where users are added or removed: q, the default
delta and the number of made-up users follow from it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.accounting import Event, Slack, StepEvent, calibration, spent
from fedsim.engine import Engine
from fedsim.keys import SecretKey
from fedsim.noise import noisy_number, slack
from fedsim.plan import expect_more_than
from fedsim.tuning.estimates import STRATEGY, GradientNorms

SIZES = np.arange(21.0)
"""Lower ends of the bins of sizes, log2."""
NORMS = np.arange(-40, 41) / 2
"""Lower ends of the bins of norms, log2; norms outside are in the first or the last bin."""
LEAST_COUNT = 2.0
"""Counts below so many standard deviations of the noise are taken for 0: most bins are empty."""
NOISE_LIMITS = (1e5, 0.1)  # cheapest, dearest


@dataclasses.dataclass(frozen=True)
class Release:
    """The price of the histograms, and what it pays for. Public."""

    epsilon: float
    """Cost for every user, with the slack."""
    delta: float
    noise_multiplier: float
    """sigma of a histogram of norms."""
    sampling_prob: float
    """q: probability of a user to be drawn for a histogram of norms."""
    count: int
    """Number of histograms of norms."""
    slack: Slack
    """Part of epsilon and delta for noise that is not ideal."""

    @classmethod
    def of(cls, epsilon: float, delta: float, *, sampling_prob: float, count: int) -> "Release":
        """The release with the least noise that costs at most epsilon at delta.

        Raises: ConfigError: epsilon is so small or so large that none does.
        """
        part = slack(len(SIZES) + count * len(NORMS), epsilon, delta)
        expect_more_than(part, "tune_epsilon", epsilon, delta)

        def spend(sigma: float, accuracy: float) -> float:
            return spent(_events(sigma, sampling_prob, count), delta - part.delta, accuracy)

        target = epsilon - part.epsilon
        sigma = calibration.calibrate("noise_multiplier", spend, target, 5.0, NOISE_LIMITS, None)
        return cls(epsilon, delta, sigma, sampling_prob, count, part)

    @property
    def events(self) -> list[tuple[Event, int]]:
        """The accountant's events."""
        return _events(self.noise_multiplier, self.sampling_prob, self.count)


def _events(sigma: float, prob: float, count: int) -> list[tuple[Event, int]]:
    return [(StepEvent(sigma / prob, 1.0), 1), (StepEvent(sigma, prob), count)]


@dataclasses.dataclass(frozen=True)
class MadeUpUsers:
    """Users of given sizes without texts, as samplers and accountants see them."""

    offsets: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[int] | np.ndarray) -> "MadeUpUsers":
        """Users with so many examples each."""
        return cls(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """The number of examples of all users together."""
        return int(self.offsets[-1])


def noisy_users(sizes: np.ndarray, release: Release, key: SecretKey) -> MadeUpUsers:
    """As many users as there are, of sizes that follow a noisy histogram of theirs.

    Guarantees: a Gaussian mechanism, the first of `Release.events`, and post-processing.
    Args:
      sizes: examples of each user, int [users]; users without any are in no bin.
    """
    stddev = release.noise_multiplier / release.sampling_prob
    logs = np.log2(sizes[sizes > 0])
    counts = _noisy_histogram(logs, SIZES, stddev, key.generator("tune: sizes"))
    middles = np.floor(2 ** (SIZES + 0.5))
    # The user at each quantile, so that the numbers add up to the number of users.
    ranks = (np.arange(len(sizes)) + 0.5) / len(sizes) * counts.sum()
    found = np.searchsorted(np.cumsum(counts), ranks)
    return MadeUpUsers.of(middles[np.minimum(found, len(SIZES) - 1)])


class NoisyNorms(GradientNorms):
    """Medians of gradient norms from noisy histograms, each released once."""

    def __init__(
        self,
        engine: Engine,
        params: Any,
        offsets: np.ndarray,
        key: SecretKey,
        *,
        most: int,
        release: Release,
    ):
        """Args:
        engine, params, offsets, key, most: as for `GradientNorms`; most is public.
        release: what was paid for.
        """
        self._release, self._left = release, release.count
        expected = max(1, round(release.sampling_prob * (len(offsets) - 1)))
        super().__init__(engine, params, offsets, key, num_users=expected, most=most)
        self.looked_at = expected  # a public number; that of the draws is none
        # The last bits of a norm depend on the program, which therefore follows from the group size
        # and `most` alone, and not from how many texts any other user has.
        self._width, self._single = most, STRATEGY

    def example_norm(self, pool: np.ndarray) -> float:
        """L_ELS, from one example of each user: more of them would weigh more."""
        return self.user_norm(1)

    def _sample(self, group_size: int) -> np.ndarray:
        draw = self._key.generator("tune: users", group_size)
        users = np.flatnonzero(draw.random(len(self._offsets) - 1) < self._release.sampling_prob)
        return users[np.diff(self._offsets)[users] > 0]

    def _estimate(self, rows: np.ndarray, what: str) -> float:
        self._left -= 1
        assert self._left >= 0, f"{self._release.count} histograms of norms were paid for"
        norms = np.concatenate([np.zeros(0), *self._batches(rows)])
        norms = norms[np.isfinite(norms)]
        logs = np.log2(np.maximum(norms, 2.0 ** NORMS[0]))
        noise = self._key.generator("tune: norms", self._left)
        counts = _noisy_histogram(logs, NORMS, self._release.noise_multiplier, noise)
        estimate = 2 ** _median(counts, NORMS)
        self.intervals[estimate] = None
        return estimate


def _noisy_histogram(
    values: np.ndarray, bins: np.ndarray, stddev: float, rng: np.random.Generator
) -> np.ndarray:
    """Counts of values in bins with noise, float64 [bins]; counts of little but noise are 0.

    Args:
      bins: lower ends, ascending; values outside are in the first or the last bin.
    """
    places = np.clip(np.searchsorted(bins, values, side="right") - 1, 0, len(bins) - 1)
    exact = np.bincount(places, minlength=len(bins))
    noisy = np.array([noisy_number(int(count), stddev, rng) for count in exact], np.float64)
    kept = np.where(noisy < LEAST_COUNT * stddev, 0.0, noisy)
    if not kept.any():  # few users or much noise: the largest count says most
        kept[np.argmax(noisy)] = 1.0
    return kept


def _median(counts: np.ndarray, bins: np.ndarray) -> float:
    """The median of counted values, on the scale of the bins, which are of one width."""
    before = np.concatenate([[0.0], np.cumsum(counts)])
    place = int(np.searchsorted(before, before[-1] / 2, side="right")) - 1
    within = (before[-1] / 2 - before[place]) / counts[place]
    return float(bins[place] + within * (bins[1] - bins[0]))
