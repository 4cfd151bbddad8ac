"""Predict what a training gains with fewer and with more users, for `forecast`.

With its algorithm and group size, what a training of T steps gains depends on
epsilon and the number of users through one number, the signal of a step,
    x = M / (sigma C),    of ELS B / (sigma C),
as long as the draw of a step changes little. So the curve of the gain against x is read off a few
trainings with fewer units a step, each with the sigma that gives its x, and the accountant says
which x so many users have. None of these trainings has a guarantee for the data, and so the
forecast has none.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.harness.common import is_finite, updated
from fedsim import accounting
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import Algorithm, PrivacyConfig, RunConfig, default_delta
from fedsim.data import Dataset
from fedsim.els import ELS
from fedsim.engine import Engine
from fedsim.errors import FedsimError
from fedsim.evaluate import VALIDATION, evaluate
from fedsim.keys import SecretKey
from fedsim.mechanism import NoisyMean
from fedsim.noise import predicted_error
from fedsim.plan import method_for
from fedsim.training import Noise, optimizers, with_defaults
from fedsim.uls import ULS

PROBES = 7
DEGREE = 2  # of the curve, in log x
# Units of a probe's step: a quarter of the job's, within these, and more where the noise has not so
# many times the variance of the draw. With a tenth of the job's, gains were 7 % too small.
SHARE, MIN_UNITS, ENOUGH_UNITS, NOISIER = 1 / 4, 4, 128, 32
TIMES = (1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64)  # the users that there are
MIN_RANGE = 8.0  # largest x over smallest of the probes
EVAL_EXAMPLES = 1024
CONFIDENCE = 0.95


class Probe(NamedTuple):
    """A training that the curve is read off."""

    signal: float
    """x."""
    batch_size: int
    gain: float
    """Fall of the held-out loss, nats per token."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Gain of held-out loss as a polynomial of log x, by least squares; it does not fall with x."""

    coefficients: np.ndarray
    """The highest power first."""
    covariance: np.ndarray
    """Of the coefficients, for gains of variance 1."""
    residual: float
    """Standard deviation of the gains around the curve, in nats."""
    freedom: int

    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> "Curve":
        """Fit the curve. Raises: FedsimError: too few probes ended with finite parameters."""
        probes = [probe for probe in probes if math.isfinite(probe.gain)]
        if (freedom := len(probes) - DEGREE - 1) < 1:
            raise FedsimError(f"forecast: {PROBES - len(probes)} of {PROBES} trainings diverged")
        logs, gains = np.log([p.signal for p in probes]), np.array([p.gain for p in probes])
        coefficients, covariance = np.polyfit(logs, gains, DEGREE, cov="unscaled")
        off = gains - np.polyval(coefficients, logs)
        return cls(coefficients, covariance, math.sqrt(float(off @ off) / freedom), freedom)

    def at(self, signal: float) -> tuple[float, float, float]:
        """Return the gain at x, and the ends of the 95 % interval of a training's gain there."""
        square, linear, _ = self.coefficients
        log, peak = math.log(signal), -linear / (2 * square) if square else math.inf
        log = min(log, peak) if square < 0 else max(log, peak) if square > 0 else log
        powers = np.vander([log], DEGREE + 1)[0]
        spread = math.sqrt(1 + float(powers @ self.covariance @ powers))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)) * self.residual * spread
        gain = float(powers @ self.coefficients)
        return gain, gain - half, gain + half


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is to be expected with so many users."""

    num_users: int
    noise_multiplier: float
    """For Poisson sampling and independent noise."""
    signal: float
    """x."""
    gain: float
    """Fall of the held-out loss, nats per token."""
    low: float
    high: float
    """Ends of its 95 % interval."""


@dataclasses.dataclass(frozen=True)
class Prober:
    """Trains with fewer units a step, from a run's starting model."""

    run: RunConfig
    data: Dataset
    params: Any
    key: SecretKey
    workers: Engine
    algorithm: Algorithm
    settings: PrivacyConfig
    """Of the algorithm, completed."""
    strategy: Strategy
    fresh: bool
    """The model is not a pretrained one."""

    def batch_for(self, signal: float) -> int:
        """Return the number of examples of a step with this x: of so many units that their draw
        matters little, at most the batch size that was asked for."""
        size, settings = num_coordinates(self.params), self.settings
        enough = math.ceil(NOISIER * (signal * settings.clip_norm) ** 2 / size)
        group = (settings.group_size or 1) if self.algorithm == Algorithm.ULS else 1
        share = min(ENOUGH_UNITS, round(SHARE * settings.batch_size / group))
        return min(settings.batch_size, max(MIN_UNITS, share, enough) * group)

    def probe(self, signals: Sequence[float]) -> Iterator[Probe]:
        """Train once for each x, and yield what each gained."""
        before = self._loss(self.params)
        for number, signal in enumerate(signals):
            key, size = self.key.in_segment(f"forecast {number}").fresh, self.batch_for(signal)
            settings = dataclasses.replace(self.settings, batch_size=size)
            method = method_for(self.algorithm, settings, self.data.train, key)
            yield Probe(signal, size, before - self._loss(self._trained(method, signal)))

    def _trained(self, method: ELS | ULS, signal: float) -> Any:
        """Parameters after a training with this x: the average, as a run would release them."""
        settings, count = self.settings, method.sampler.expected_count
        clip = Clip(settings.clip_norm, normalised=settings.clipping == "normalised")
        sigma = count / (signal * clip.norm)
        stddev, steps = clip.sensitivity * sigma / count, settings.num_steps
        run = with_defaults(self.run, Noise(stddev, clip.sensitivity, steps), fresh=self.fresh)

        def gradient(params: Any, step: int) -> NoisyMean:
            options = {"clip": clip, "noise_multiplier": sigma, "strategy": self.strategy}
            return method.gradient(params, step, self.workers, **options)[0]

        average, update = self.params, optimizers.update_rule(run, optimizers.rate_of(run, steps))
        of_steps = updated(gradient, update, self.params, steps)
        for step, params in enumerate(of_steps, 1):
            average = optimizers.averaged(average, params, run.ema or 0.0, step)
        return average

    def _loss(self, params: Any) -> float:
        """Held-out loss, of users outside of training where there are any; nan: it diverged."""
        if not is_finite(params):
            return math.nan
        found = evaluate(self.workers, params, self.data, EVAL_EXAMPLES)
        return next(found[name] for name in VALIDATION.values() if name in found)


def signals_by_users(
    advice: Any, privacy: PrivacyConfig, num_users: int, num_units: int
) -> list[tuple[int, float, float]]:
    """(Users, noise multiplier, x) for fractions and multiples of the users that there are.

    Args:
      advice: of `fedsim.recommend` for the algorithm, for the users that there are.
      privacy: the settings as requested; without a delta it is N^-1.1.
      num_units: users, or places in the pool of ELS, in proportion to which there are others.
    """
    steps, count = privacy.num_steps, advice.expected_count
    group = advice.group_size if advice.algorithm == Algorithm.ELS else 1

    @functools.cache
    def sigma(times: float) -> float:
        return accounting.noise_multiplier(
            epsilon=privacy.epsilon,
            delta=privacy.delta or default_delta(round(num_users * times)),
            num_steps=steps,
            sampling_prob=count / (num_units * times),
            max_contributions=group,
        )

    # Sampling and noise that were chosen for less noise on sums count as they do for these users.
    here = predicted_error(1.0, steps, 1) / advice.noise_on_sums
    return [
        (round(num_users * times), sigma(times), here * sigma(1) / sigma(times))
        for times in TIMES
        if count <= num_units * times and round(num_users * times) > 1
    ]


def expectations(prober: Prober, by_users: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Forecast for the users of `signals_by_users`, and the probes they were read off.

    Raises: FedsimError: too many trainings diverged.
    """
    least, most = min(x for *_, x in by_users), max(x for *_, x in by_users)
    wider = max(1.0, math.sqrt(MIN_RANGE / (most / least)))
    signals = np.geomspace(least / wider, most * wider, PROBES).tolist()
    probes = [*prober.probe(signals)]
    curve = Curve.fit(probes)
    rows = [Forecast(*facts, *curve.at(facts[-1])) for facts in by_users]
    return {
        "probes": [probe._asdict() for probe in probes],
        "residual": curve.residual,
        "users": [dataclasses.asdict(row) for row in rows],
    }
