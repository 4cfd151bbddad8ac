"""The one accountant: user-level (epsilon, delta) of DP-SGD-ELS and DP-SGD-ULS.

Source: Charles et al. 2024, Theorems 1 and 2. Adjacency is add-or-remove one user, both directions,
with Poisson sampling: a shuffled run is not what is accounted here.

Every epsilon and delta is an upper bound, on any grid of the privacy loss. The grid is refined
until the answer is predicted to lie within RELATIVE_ACCURACY of the exact one, or until it has
_LARGEST_REFINEMENT points. One-step losses are kept, so asking again about a step is cheap.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import dp_accounting
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import optimize, stats

from fedsim import calibration, mixture
from fedsim.calibration import Progress, cached

RELATIVE_ACCURACY = calibration.SPEND_ACCURACY
"""How far above the exact value an adaptive answer may lie: predicted, mostly five times better."""

_FIRST_GRID = 1024  # points of the coarsest one-step grid
_SMALLEST_DELTA = mixture.COMPOSED_TAIL_MASS  # nothing below is resolved
_LARGEST_REFINEMENT = 2**18  # composed points: a second or so

Query = Callable[[PrivacyLossDistribution], np.ndarray]


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """One released step: N(Binomial(max_contributions, sampling_prob), noise_multiplier^2).

    ELS: max_contributions = G_ELS, the cap that D_sub enforces. ULS: always 1, since a user's
    gradient is clipped as a whole; its group size never reaches the accountant.

    Raises: ValueError: a field is out of range.
    """

    noise_multiplier: float
    """sigma: standard deviation of the noise on the sum, in units of the sensitivity. > 0."""
    sampling_prob: float
    """p or q: probability that a sampling unit takes part in a step. In (0, 1]."""
    max_contributions: int = 1
    """How many sampling units one user can have in a step. A whole number >= 1."""

    def __post_init__(self) -> None:
        noise, prob = self.noise_multiplier, self.sampling_prob
        _require("noise_multiplier", noise, 0 < noise < math.inf, "> 0 and finite")
        _require("sampling_prob", prob, 0 < prob <= 1, "in (0, 1]")
        _require_count("max_contributions", self.max_contributions, 1)

    def to_dp_event(self) -> dp_accounting.DpEvent:
        """The same step in dp_accounting's words, for any other accountant to check."""
        if self.max_contributions == 1:
            gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
            return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, gaussian)
        counts = range(self.max_contributions + 1)
        probs = stats.binom.pmf(counts, self.max_contributions, self.sampling_prob)
        return dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
            self.noise_multiplier, tuple(counts), tuple(probs.tolist())
        )


Phases = Sequence[tuple[StepEvent, int]]
"""What was released: events, each with its number of steps, composed."""


def epsilon(
    phases: Phases,
    delta: float,
    *,
    discretization: float | None = None,
    progress: Progress = None,
) -> float:
    """The smallest epsilon for which the phases together are (epsilon, delta)-DP, from above.

    Args:
      discretization: grid of the privacy loss; None chooses it by RELATIVE_ACCURACY.
    Returns: inf where delta is too small to be resolved (about 1e-15).
    Raises: ValueError: delta outside (0, 1), a negative count, or a grid beyond the memory cap.
    >>> round(epsilon([(StepEvent(noise_multiplier=1.0, sampling_prob=0.01), 100)], 1e-6), 3)
    0.954
    """
    _require("delta", delta, 0 < delta < 1, "in (0, 1)")
    return float(_answer(phases, _epsilon_query(delta), 1, discretization, progress)[0])


def delta(
    phases: Phases,
    epsilon: float,
    *,
    discretization: float | None = None,
    progress: Progress = None,
) -> float:
    """The smallest delta for which the phases together are (epsilon, delta)-DP, from above."""
    curve = privacy_curve(phases, [epsilon], discretization=discretization, progress=progress)
    return float(curve[0])


def privacy_curve(
    phases: Phases,
    epsilons: Sequence[float] | np.ndarray,
    *,
    discretization: float | None = None,
    progress: Progress = None,
) -> np.ndarray:
    """delta at each epsilon: the whole trade-off of the phases, from above. Shape [epsilons].

    Raises: ValueError: an epsilon is negative.
    """
    for value in epsilons:
        _require("epsilon", value, 0 <= value < math.inf, ">= 0 and finite")

    def query(pld: PrivacyLossDistribution) -> np.ndarray:
        deltas = [float(pld.get_delta_for_epsilon(float(value))) for value in epsilons]
        return np.clip(deltas, _SMALLEST_DELTA, 1.0)

    return _answer(phases, query, len(epsilons), discretization, progress)


class RunningEpsilon:
    """epsilon after t steps of one event, cheap enough to call while training.

    Guarantees: every answer is an upper bound, within about RELATIVE_ACCURACY of epsilon().
    The grid is chosen anew when t has doubled; in between, a call is one composition.
    """

    def __init__(self, event: StepEvent, delta: float) -> None:
        _require("delta", delta, 0 < delta < 1, "in (0, 1)")
        self._event, self._delta = event, delta
        self._chosen_at, self._discretization = 0, 0.0

    def __call__(self, num_steps: int) -> float:
        _require_count("num_steps", num_steps, 0)
        phases = [(self._event, num_steps)]
        if 0 < self._chosen_at <= num_steps < 2 * self._chosen_at:
            return epsilon(phases, self._delta, discretization=self._discretization)
        if num_steps == 0:
            return 0.0
        answer, self._discretization = _refine(phases, _epsilon_query(self._delta))
        self._chosen_at = num_steps
        return float(answer[0])


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    sampling_prob: float,
    max_contributions: int = 1,
    progress: Progress = None,
) -> float:
    """The smallest sigma that keeps num_steps steps within (epsilon, delta).

    Guarantees: the module's epsilon() of the result is at most `epsilon`. Kept on disk.
    Raises: ValueError: an argument is out of range, or no sigma up to 1e6 is enough.
    """
    _require_target(epsilon, delta)
    _require_count("num_steps", num_steps, 1)
    event = StepEvent(1.0, sampling_prob, max_contributions)
    # A Gaussian mechanism with the mean contribution as its sensitivity is the right size.
    mean = max_contributions * sampling_prob * math.sqrt(num_steps)
    guess = max(0.5, mean * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)

    def spend(sigma: float, accuracy: float) -> float:
        step = dataclasses.replace(event, noise_multiplier=sigma)
        return _spent(step, num_steps, delta, accuracy)

    def solve() -> float:
        return calibration.calibrate(
            "noise_multiplier", spend, epsilon, guess, (1e6, 1e-2), progress
        )

    return cached("noise_multiplier", (epsilon, delta, num_steps, event), solve)


def sampling_prob(
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    noise_multiplier: float,
    max_contributions: int = 1,
    progress: Progress = None,
) -> float:
    """The largest sampling probability that keeps num_steps steps within (epsilon, delta).

    Raises: ValueError: an argument is out of range, or even 1e-12 is too much.
    """
    _require_target(epsilon, delta)
    _require_count("num_steps", num_steps, 1)
    event = StepEvent(noise_multiplier, 1.0, max_contributions)

    def spend(prob: float, accuracy: float) -> float:
        step = dataclasses.replace(event, sampling_prob=min(prob, 1.0))
        return _spent(step, num_steps, delta, accuracy)

    def solve() -> float:
        return calibration.calibrate("sampling_prob", spend, epsilon, 1e-2, (1e-12, 1.0), progress)

    return cached("sampling_prob", (epsilon, delta, num_steps, event), solve)


def num_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_prob: float,
    max_contributions: int = 1,
    progress: Progress = None,
) -> int:
    """The largest number of steps, up to 1e7, that stays within (epsilon, delta).

    Raises: ValueError: an argument is out of range, or even one step is too much.
    """
    _require_target(epsilon, delta)
    event = StepEvent(noise_multiplier, sampling_prob, max_contributions)

    def spend(steps: float, accuracy: float) -> float:
        return _spent(event, max(1, int(steps)), delta, accuracy)

    def solve() -> float:
        steps = max(
            1, int(calibration.calibrate("num_steps", spend, epsilon, 1e3, (1.0, 1e7), progress))
        )
        while steps < 1e7 and spend(steps + 1, RELATIVE_ACCURACY) <= epsilon:
            steps += 1
        return steps

    return int(cached("num_steps", (epsilon, delta, event), solve))


def black_box_epsilon(event: StepEvent, num_steps: int, delta: float) -> float:
    """The user-level epsilon that group privacy alone gives from an example-level guarantee.

    (epsilon_0, delta_0) for one contribution gives G epsilon_0 and
    delta_0 (e^(G epsilon_0) - 1) / (e^epsilon_0 - 1) for G; the smallest epsilon_0 that meets
    delta is used. delta_0 may have to be astronomically small: below what the composed loss
    resolves it comes from Renyi divergences.
    Returns: inf where no epsilon_0 meets delta.
    Source: Vadhan 2017, Lemma 2.2; the baseline of Figure 1.
    """
    _require("delta", delta, 0 < delta < 1, "in (0, 1)")
    _require_count("num_steps", num_steps, 1)
    group = event.max_contributions
    example = dataclasses.replace(event, max_contributions=1)
    if group == 1:
        return epsilon([(example, num_steps)], delta)
    example_log_delta = _example_log_delta(example, num_steps, delta)

    def excess(level: float) -> float:
        """log of delta's group version over delta."""
        ratio = math.log(-math.expm1(-group * level) / -math.expm1(-level))
        return example_log_delta(level) + (group - 1) * level + ratio - math.log(delta)

    levels = np.geomspace(1e-6, 1e9, 1000)
    enough = next((i for i, level in enumerate(levels) if excess(level) <= 0), None)
    if enough is None:
        return math.inf
    root = optimize.root_scalar(excess, bracket=(levels[enough - 1], levels[enough]), rtol=1e-9)
    return group * root.root * (1 + 1e-6)


def truncated_sampling_delta(
    delta: float, epsilon: float, num_steps: int, num_units: int, sampling_prob: float, cap: int
) -> float:
    """delta + (1 + e^epsilon) num_steps P[Binomial(num_units, sampling_prob) > cap].

    The price of cutting every Poisson sample down to `cap` units: the truncated run differs from
    the accounted one only if some sample was larger. At most 1.
    Raises: ValueError: an argument is out of range.
    """
    _require_target(epsilon, delta)
    _require("sampling_prob", sampling_prob, 0 < sampling_prob <= 1, "in (0, 1]")
    for name, value in (("num_steps", num_steps), ("num_units", num_units), ("cap", cap)):
        _require_count(name, value, 0 if name == "cap" else 1)
    tail = stats.binom.logsf(cap, num_units, sampling_prob)
    return min(
        1.0, delta + math.exp(min(0.0, np.logaddexp(0, epsilon) + math.log(num_steps) + tail))
    )


def _example_log_delta(event: StepEvent, num_steps: int, delta: float) -> Callable[[float], float]:
    """log delta as a function of epsilon, from the composed loss or, far out, from Renyi orders."""
    phases = [(event, num_steps)]
    composed = _compose(phases, _refine(phases, _epsilon_query(delta))[1])
    floor = 10 * _SMALLEST_DELTA
    resolved = mixture.epsilon_at(composed, floor)
    orders = np.unique(np.geomspace(2, 4096, 100).astype(int))
    renyi = dp_accounting.rdp.RdpAccountant(orders.tolist())
    renyi.compose(dp_accounting.SelfComposedDpEvent(event.to_dp_event(), num_steps))
    divergences = np.asarray(renyi._rdp)

    def log_delta(level: float) -> float:
        if level < resolved:
            return math.log(float(composed.get_delta_for_epsilon(level)))
        # Canonne, Kamath and Steinke 2020, Proposition 12.
        exponents = (orders - 1) * (divergences - level + np.log1p(-1 / orders)) - np.log(orders)
        return min(math.log(floor), float(exponents.min()))

    return log_delta


def _epsilon_query(delta: float) -> Query:
    return lambda pld: np.array([mixture.epsilon_at(pld, delta)])


def _spent(event: StepEvent, num_steps: int, delta: float, accuracy: float) -> float:
    """epsilon(), or inf where the noise is so small that no grid can hold the loss."""
    try:
        return float(_refine([(event, num_steps)], _epsilon_query(delta), accuracy)[0][0])
    except mixture.GridTooLargeError:
        return math.inf


def _answer(
    phases: Phases,
    query: Query,
    size: int,
    discretization: float | None,
    progress: Progress,
) -> np.ndarray:
    merged = _merge(phases)
    if not merged or size == 0:
        return np.zeros(size)
    if discretization is None:
        return _refine(phases, query, progress=progress)[0]
    _require("discretization", discretization, 0 < discretization <= 1, "in (0, 1]")
    return query(_compose(merged, discretization))


def _refine(
    phases: Phases, query: Query, accuracy: float = RELATIVE_ACCURACY, progress: Progress = None
) -> tuple[np.ndarray, float]:
    """The query's answer on an adaptive grid, and the grid that was enough for it.

    The error of connecting the dots falls with the grid's width, at least in proportion and mostly
    with its square: two grids tell what error the finer one has left, at most.
    """
    merged, report = _merge(phases), calibration.throttled(progress)
    widest = max(_loss_range(event) for event, _ in merged)
    grid = min(1.0, 2.0 ** math.floor(math.log2(widest / _FIRST_GRID)))
    composed = _compose(merged, grid)
    answer, factor = query(composed), 4
    while np.isfinite(answer).all() and answer.any():
        while factor * composed._pmf_remove.size > _LARGEST_REFINEMENT:
            factor //= 2
        if factor < 2:
            break
        grid /= factor
        composed = _compose(merged, grid)
        before, answer = answer, query(composed)
        report(f"discretization {grid:.1e}: {answer[-1]:.6g}")
        error = np.max((before - answer) / np.maximum(answer, 1e-300)) / (factor - 1)
        if error <= accuracy:
            break
        factor = 2 ** min(3, math.ceil(math.log2(error / accuracy) / 2))
    return answer, grid


def _compose(phases: Phases, discretization: float) -> PrivacyLossDistribution:
    return mixture.compose([(_one_step(event, discretization), count) for event, count in phases])


@functools.lru_cache(maxsize=16)
def _one_step(event: StepEvent, discretization: float) -> PrivacyLossDistribution:
    return mixture.one_step_pld(_mixture(event), discretization)


def _loss_range(event: StepEvent) -> float:
    lowest, highest = mixture.loss_range(_mixture(event))
    return highest - lowest


def _mixture(event: StepEvent) -> mixture.Mixture:
    return mixture.binomial_mixture(
        event.noise_multiplier, event.max_contributions, event.sampling_prob
    )


def _merge(phases: Phases) -> list[tuple[StepEvent, int]]:
    """Equal events added up, phases without a step left out."""
    counts: dict[StepEvent, int] = {}
    for event, count in phases:
        _require_count("num_steps", count, 0)
        counts[event] = counts.get(event, 0) + int(count)
    return [(event, count) for event, count in counts.items() if count > 0]


def _require(name: str, value: object, holds: bool, expectation: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: expected {expectation}")


def _require_count(name: str, value: int, least: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    _require(name, value, whole and value >= least, f"a whole number >= {least}")


def _require_target(epsilon: float, delta: float) -> None:
    _require("epsilon", epsilon, 0 < epsilon < math.inf, "> 0 and finite")
    _require("delta", delta, 0 < delta < 1, "in (0, 1)")
