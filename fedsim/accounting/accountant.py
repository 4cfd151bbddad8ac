"""The one accountant: user-level (epsilon, delta) of DP-SGD-ELS and DP-SGD-ULS.

Source: Charles et al. 2024, Theorems 1 and 2. Adjacency is add-or-remove one user, both directions,
with Poisson sampling, of all users or of a group of them in turn: a shuffled run is not what is
accounted here.

Every epsilon and delta is an upper bound, on any grid of the privacy loss. The grid is refined
until the answer is predicted to lie within RELATIVE_ACCURACY of the exact one, or until it is as
fine as refinement allows. One-step losses are kept, so asking again about a step is cheap.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import stats

from fedsim.accounting import allocation, calibration, composition, grids, mixture
from fedsim.accounting.calibration import Progress, cached
from fedsim.accounting.grids import Query
from fedsim.accounting.pure_dp import PureEvent, pure_pld, pure_pmf
from fedsim.accounting.selection import SelectionEvent, selection_pmf
from fedsim.accounting.selection import loss_range as selection_range
from fedsim.errors import expect, expect_count

RELATIVE_ACCURACY = calibration.SPEND_ACCURACY
"""How far above the exact value an adaptive answer may lie: predicted, and mostly less."""

_MOST_STEPS = 10**7  # that calibration looks for
_FIRST_GRID = 1024  # points of the coarsest one-step grid
_TRIAL_DELTA = 1e-9  # that the grid of a trial's loss is chosen for
_SMALLEST_DELTA = composition.COMPOSED_TAIL_MASS  # nothing below is resolved


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """One released step: N(Binomial(max_contributions, sampling_prob), noise_multiplier^2).

    ELS: max_contributions = G_ELS, the cap that D_sub enforces. ULS: always 1, since a user's
    gradient is clipped as a whole; its group size never reaches the accountant. Where texts have
    several owners, a user also has texts in the groups of others, max_changed of them at most:
    without the user these are not gone, but other ones. N(Binomial(max_contributions +
    max_changed, q), sigma^2) against N(-Binomial(max_changed, q), sigma^2); docs/shared.md.

    Raises: ConfigError: a field is out of range.
    """

    noise_multiplier: float
    """sigma: standard deviation of the noise on the sum, in units of the sensitivity. > 0."""
    sampling_prob: float
    """p or q: probability that a sampling unit takes part in a step. In (0, 1]."""
    max_contributions: int = 1
    """How many sampling units one user can have in a step. A whole number >= 1."""
    cycle: int = 1
    """A user can take part in one of so many successive steps, the same in every cycle, and what
    they add is in no more than one cycle's steps. A whole number >= 1."""
    max_changed: int = 0
    """How many units of others one user can change. A whole number >= 0."""
    allocated: bool = False
    """Random allocation: a user takes part in exactly one step of a cycle, each as probably;
    sampling_prob is then 1, and a user is one unit."""

    def __post_init__(self) -> None:
        noise, prob = self.noise_multiplier, self.sampling_prob
        expect("noise_multiplier", noise, 0 < noise < math.inf, "> 0 and finite")
        expect("sampling_prob", prob, 0 < prob <= 1, "in (0, 1]")
        expect_count("max_contributions", self.max_contributions, 1)
        expect_count("cycle", self.cycle, 1)
        expect_count("max_changed", self.max_changed, 0)
        if self.allocated:
            expect("sampling_prob", prob, prob == 1, "1 with random allocation")
            expect("max_contributions", self.max_contributions, self._is_one, "1, and no others")

    @property
    def _is_one(self) -> bool:
        return self.max_contributions == 1 and not self.max_changed

    def to_dp_event(self) -> dp_accounting.DpEvent:
        """The same step in dp_accounting's words, for any other accountant to check.

        Raises: ConfigError: it has no words for units that change, nor for random allocation.
        """
        expect("allocated", self.allocated, not self.allocated, "false for dp_accounting")
        expect("max_changed", self.max_changed, not self.max_changed, "0 for dp_accounting")
        if self.max_contributions == 1:
            gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
            return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, gaussian)
        counts = range(self.max_contributions + 1)
        probs = stats.binom.pmf(counts, self.max_contributions, self.sampling_prob)
        return dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
            self.noise_multiplier, tuple(counts), tuple(probs.tolist())
        )


Event = StepEvent | PureEvent | SelectionEvent
Phases = Sequence[tuple[Event, int]]
"""What was released: events, each with its number of successive steps, composed."""


def cyclic_event(
    noise_multiplier: float, sampling_prob: float, max_contributions: int, bands: int
) -> StepEvent:
    """A step of cyclic Poisson sampling, in which `sampling_prob` of all users are expected: those
    of one of `bands` groups can take part, `bands` times as probably."""
    prob = min(max(1.0, sampling_prob), sampling_prob * bands)  # above 1 only what was given so
    return StepEvent(noise_multiplier, prob, max_contributions, bands)


def allocated_event(noise_multiplier: float, window: int) -> StepEvent:
    """A step of random allocation, in which a user takes part once in every `window` steps."""
    return StepEvent(noise_multiplier, 1.0, 1, window, allocated=True)


def event_fields(event: Event) -> dict[str, Any]:
    """An event in JSON's types."""
    fields = dataclasses.asdict(event)
    # As it was written before these were.
    for name, usual in (("cycle", 1), ("max_changed", 0), ("allocated", False)):
        if fields.get(name) == usual:
            del fields[name]
    return fields


def event_of(fields: Mapping[str, Any]) -> StepEvent:
    """The event of a step that `event_fields` wrote. Raises: ConfigError, TypeError: it did not."""
    return StepEvent(**fields)


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
    Returns: inf where delta is too small to be resolved (1e-15, and 4e-19 per step).
    Raises: ConfigError: delta outside (0, 1), a negative count, or a grid beyond the memory cap.
    >>> round(epsilon([(StepEvent(noise_multiplier=1.0, sampling_prob=0.01), 100)], 1e-6), 3)
    0.954
    """
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
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

    Raises: ConfigError: an epsilon is negative.
    """
    for value in epsilons:
        expect("epsilon", value, 0 <= value < math.inf, ">= 0 and finite")

    def query(pmf: DensePLDPmf) -> np.ndarray:
        deltas = [float(pmf.get_delta_for_epsilon(float(value))) for value in epsilons]
        return np.clip(deltas, _SMALLEST_DELTA, 1.0)

    return _answer(phases, query, len(epsilons), discretization, progress)


def composed_loss(phases: Phases, delta: float) -> PrivacyLossDistribution:
    """The composed loss of some steps, on the grid that epsilon() needs at this delta."""
    return _compose(_merge(phases), _refine(phases, _epsilon_query(delta))[1])


class RunningEpsilon:
    """epsilon after `before` and t steps of one event, cheap enough to call while training.

    Guarantees: every answer is an upper bound, within about RELATIVE_ACCURACY of epsilon().
    The grid is chosen anew when t has doubled; in between, a call is one composition.
    """

    def __init__(self, event: StepEvent, delta: float, before: Phases = ()) -> None:
        expect("delta", delta, 0 < delta < 1, "in (0, 1)")
        self._event, self._delta, self._before = event, delta, before
        self._chosen_at, self._discretization = 0, 0.0

    def __call__(self, num_steps: int) -> float:
        expect_count("num_steps", num_steps, 0)
        phases = [*self._before, (self._event, num_steps)]
        if 0 < self._chosen_at <= num_steps < 2 * self._chosen_at:
            return epsilon(phases, self._delta, discretization=self._discretization)
        if num_steps == 0:
            return epsilon(self._before, self._delta)
        answer, self._discretization = _refine(phases, _epsilon_query(self._delta))
        self._chosen_at = num_steps
        return float(answer[0])


def calibrate_noise(
    event: Callable[[float], StepEvent],
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    before: Phases = (),
    progress: Progress = None,
) -> float:
    """The smallest sigma that keeps num_steps steps, and `before`, within (epsilon, delta).

    Guarantees: the module's epsilon() of the result is at most `epsilon`. Kept on disk.
    Args: event: sigma -> what one step with it is; a sampler's or an algorithm's `event`.
    Raises: ConfigError: an argument is out of range, or no sigma up to 1e6 is enough.
    """
    _expect_target(epsilon, delta)
    expect_count("num_steps", num_steps, 1)
    unit = event(1.0)
    # A Gaussian mechanism with the mean contribution as its sensitivity is the right size.
    blocks = math.ceil(num_steps / unit.cycle)
    most = unit.max_contributions + 2 * unit.max_changed
    most *= 1 / math.sqrt(unit.cycle) if unit.allocated else 1.0
    mean = most * unit.sampling_prob * math.sqrt(blocks)
    guess = max(0.5, mean * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)

    def spend(sigma: float, accuracy: float) -> float:
        return _spent([*before, (event(sigma), num_steps)], delta, accuracy)

    def solve() -> float:
        return calibration.calibrate(
            "noise_multiplier", spend, epsilon, guess, (1e6, 1e-2), progress
        )

    key = (epsilon, delta, num_steps, unit, *before)
    return cached("noise_multiplier", key, solve)


def noise_multiplier(
    *,
    sampling_prob: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    **target: Any,
) -> float:
    """`calibrate_noise` of steps with this sampling: Poisson, or cyclic with several bands.

    Args: target: epsilon, delta and num_steps; before and progress, as there.
    """

    def event(sigma: float) -> StepEvent:
        event = cyclic_event(sigma, sampling_prob, max_contributions, bands)
        return dataclasses.replace(event, max_changed=max_changed)

    return calibrate_noise(event, **target)


def sampling_prob(
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    noise_multiplier: float,
    max_contributions: int = 1,
    bands: int = 1,
    progress: Progress = None,
) -> float:
    """The largest sampling probability that keeps num_steps steps within (epsilon, delta).

    With several bands, that of cyclic sampling: at most 1 / bands.
    Raises: ConfigError: an argument is out of range, or even 1e-12 is too much.
    """
    _expect_target(epsilon, delta)
    expect_count("num_steps", num_steps, 1)
    event = StepEvent(noise_multiplier, 1.0, max_contributions, bands)
    limits = (1e-12, 1.0 / bands)

    def spend(prob: float, accuracy: float) -> float:
        step = cyclic_event(noise_multiplier, prob, max_contributions, bands)
        return _spent([(step, num_steps)], delta, accuracy)

    def solve() -> float:
        return calibration.calibrate("sampling_prob", spend, epsilon, 1e-2, limits, progress)

    return cached("sampling_prob", (epsilon, delta, num_steps, event), solve)


def num_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_prob: float,
    max_contributions: int = 1,
    bands: int = 1,
    progress: Progress = None,
) -> int:
    """The largest number of steps, up to 1e7, that stays within (epsilon, delta).

    Raises: ConfigError: an argument is out of range, or even one step is too much.
    """
    _expect_target(epsilon, delta)
    event = cyclic_event(noise_multiplier, sampling_prob, max_contributions, bands)

    report = calibration.throttled(progress)

    def spent(steps: int) -> float:
        value = _spent([(event, steps)], delta, RELATIVE_ACCURACY)
        report(f"num_steps {steps}: epsilon {value:.6g}")
        return value

    def solve() -> float:
        least = spent(1)
        expect("epsilon", epsilon, least <= epsilon, f"at least {least:.4g}, spent by one step")
        low, high = 1, 2
        while high <= _MOST_STEPS and spent(high) <= epsilon:
            low, high = high, 4 * high
        high = min(high, _MOST_STEPS + 1)
        while high - low > 1:
            middle = max(low + 1, min(high - 1, round(math.sqrt(low * high))))
            low, high = (middle, high) if spent(middle) <= epsilon else (low, middle)
        return low

    return int(cached("num_steps", (epsilon, delta, event), solve))


def _epsilon_query(delta: float) -> Query:
    return lambda pmf: np.array([composition.pmf_epsilon_at(pmf, delta)])


def _spent(phases: Phases, delta: float, accuracy: float) -> float:
    """epsilon(), or inf where the noise is so small that no grid can hold the loss."""
    try:
        return float(_refine(phases, _epsilon_query(delta), accuracy)[0][0])
    except composition.GridTooLargeError:
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
        try:
            return _refine(phases, query, progress=progress)[0]
        except composition.GridTooLargeError:
            least = min(
                event.noise_multiplier for event, _ in merged if isinstance(event, StepEvent)
            )
            raise composition.GridTooLargeError(
                f"noise_multiplier={least:g}: expected more noise: the privacy loss of so many "
                "steps is too large to be added up, and protects nobody"
            ) from None
    expect("discretization", discretization, 0 < discretization <= 1, "in (0, 1]")
    halves = composition.directions(_compose(merged, discretization))
    return np.maximum(*map(query, halves))


def _refine(
    phases: Phases, query: Query, accuracy: float = RELATIVE_ACCURACY, progress: Progress = None
) -> tuple[np.ndarray, float]:
    """The query's answer on an adaptive grid, and the grid that was enough for it.

    Any grid gives an upper bound. So a direction whose bound has fallen below the other's answer
    needs no finer grid, which is soon the fate of ADD.
    """
    merged, report = _merge(phases), calibration.throttled(progress)
    widest = max(_loss_range(event) for event, _ in merged)
    coarsest = min(1.0, 2.0 ** math.floor(math.log2(widest / _FIRST_GRID)))
    answer, finest = None, coarsest
    for direction in (composition.REMOVE, composition.ADD):
        compose = functools.partial(_compose_direction, merged, direction)
        found, grid = grids.refine(compose, query, coarsest, accuracy, answer, report)
        answer = found if answer is None else np.maximum(found, answer)
        finest = min(finest, grid)
    assert answer is not None
    return answer, finest


def _compose(phases: Phases, discretization: float) -> PrivacyLossDistribution:
    return composition.compose(
        [(_one_step(event, discretization), count) for event, count in phases]
    )


def _compose_direction(phases: Phases, direction: int, discretization: float) -> DensePLDPmf:
    steps = [(_one_direction(event, discretization, direction), count) for event, count in phases]
    return composition.compose_pmfs(steps)


@functools.lru_cache(maxsize=16)
def _one_direction(event: Event, discretization: float, direction: int) -> DensePLDPmf:
    if isinstance(event, PureEvent):
        return pure_pmf(event, discretization)
    if isinstance(event, SelectionEvent):
        return selection_pmf(event, _trials(event), discretization)
    if event.allocated:
        noise, steps = event.noise_multiplier, event.cycle
        return allocation.one_window_pmf(noise, steps, discretization, direction)
    return mixture.one_step_pmf(_mixture(event), discretization, direction)


@functools.lru_cache(maxsize=16)
def _one_step(event: Event, discretization: float) -> PrivacyLossDistribution:
    if isinstance(event, PureEvent):
        return pure_pld(event, discretization)
    if isinstance(event, SelectionEvent):
        return PrivacyLossDistribution(*[_one_direction(event, discretization, 0)] * 2)
    if event.allocated:
        return PrivacyLossDistribution(*[_one_direction(event, discretization, d) for d in (0, 1)])
    return mixture.one_step_pld(_mixture(event), discretization)


def _loss_range(event: Event) -> float:
    if isinstance(event, PureEvent):
        return 2 * event.epsilon
    if isinstance(event, SelectionEvent):
        return selection_range(event, _trials(event))
    if event.allocated:
        lowest, highest = allocation.loss_range(event.noise_multiplier, event.cycle)
        return highest - lowest
    lowest, highest = mixture.loss_range(_mixture(event))
    return highest - lowest


@functools.lru_cache(maxsize=16)
def _trials(event: SelectionEvent) -> list[PrivacyLossDistribution]:
    """The loss of a trial of each candidate."""
    return [composed_loss(candidate, _TRIAL_DELTA) for candidate in event.candidates]


def _mixture(event: StepEvent) -> mixture.Mixture:
    noise, most, prob = event.noise_multiplier, event.max_contributions, event.sampling_prob
    if event.max_changed:
        return mixture.changing_mixture(noise, most, event.max_changed, prob)
    return mixture.binomial_mixture(noise, most, prob)


def _merge(phases: Phases) -> list[tuple[Event, int]]:
    """Equal events added up, phases without a step left out.

    Of a cycle, the steps after a user's own release nothing more of them, whichever these are: what
    is composed is one event for every cycle that was begun.
    """
    counts: dict[Event, int] = {}
    for event, count in phases:
        expect_count("num_steps", count, 0)
        count = int(count)
        if isinstance(event, StepEvent):
            blocks = -(-count // event.cycle)
            event, count = event if event.allocated else dataclasses.replace(event, cycle=1), blocks
        counts[event] = counts.get(event, 0) + count
    return [(event, count) for event, count in counts.items() if count > 0]


def _expect_target(epsilon: float, delta: float) -> None:
    expect("epsilon", epsilon, 0 < epsilon < math.inf, "> 0 and finite")
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    expect("delta", delta, delta > _SMALLEST_DELTA, "above 1e-15: nothing smaller is resolved")
