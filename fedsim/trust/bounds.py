"""Three tests of a claimed privacy curve by a single run: two by guesses, one by the noise.

Each of many canaries was included or left out by the toss of a coin. More correct guesses of the
coins than the claimed curve allows refute it, and so does noise that is shorter than claimed.

1. `audit_curve`: whatever the mechanism, and however the release about one canary depends on the
   others (Mahloujifar, Melis and Chaudhuri 2024).
2. `audit_guesses`: where each canary's score depends on its own coin alone.
3. `audit_noise`: the releases minus the sums before noise are noise.

Assumptions, theorem and proofs: docs/theory/audits.md.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy import optimize, special, stats

from fedsim.accounting import Events, StepEvent, gaussian_epsilon
from fedsim.clipping import lattice_bits
from fedsim.keys import SecretKey
from fedsim.noise import CELLS_BITS, AddNoise

Claim = Callable[[float], float]
"""y -> the least probability, on one of two neighbouring data sets, of an event that has
probability y on the other."""

OPTIONS = tuple((share, above) for share in (1 / 8, 1 / 4, 1 / 2) for above in (1, 1 / 2))
OPTIONS += ((1, 1 / 2),)
"""What is guessed, decided before the run: (share of the canaries whose coins are guessed, the
surest first; share of these guesses that say "included"). The last guesses all coins."""


@dataclasses.dataclass(frozen=True)
class CurveBound:
    """Result of testing a claimed trade-off curve by guesses of coins."""

    refuted: bool
    could_refute: bool
    """True if it would be refuted with every guess right."""
    guesses: int
    correct: int


@dataclasses.dataclass(frozen=True)
class GuessBound(CurveBound):
    """Result of testing a claimed trade-off curve by guesses of all coins."""

    epsilon: float
    """Lower bound at the claim's delta, by the curve of the Gaussian mechanism."""


def curve_claim(epsilons: np.ndarray, deltas: np.ndarray) -> Claim:
    """The claim that a mechanism is (epsilon, delta)-DP for each of the pairs, [pairs] each."""
    grown = np.exp(epsilons)

    def least(y: float) -> float:
        below = np.max((y - deltas) / grown, initial=0.0)
        above = np.max(1 - deltas - grown * (1 - y), initial=0.0)
        return float(max(below, above))

    return least


def guess_counts(scores: np.ndarray, included: np.ndarray) -> list[tuple[int, int]]:
    """(guesses, correct ones) of each of OPTIONS. Args: as of `audit_curve`."""
    count, took_part = len(scores), included[np.argsort(-scores, kind="stable")]
    tried = []
    for share, share_above in OPTIONS:
        guesses = max(1, round(share * count))
        above = math.ceil(share_above * guesses)
        left_out = ~took_part[count - (guesses - above) :]
        tried.append((guesses, int(took_part[:above].sum() + left_out.sum())))
    return tried


def refutes(canaries: int, guesses: int, correct: int, claim: Claim, significance: float) -> bool:
    """True if so many correct guesses have less than this probability if the claim holds.

    Args:
      canaries: each was included with probability 1/2, independently.
      guesses: number of guesses, decided before the run.
      correct: how many of them were right.
      significance: the probability.

    Source: Mahloujifar et al. 2024, Algorithm 3, for coins of two sides.
    """
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        grown = max(wrong, claim(right))
        if grown == wrong:
            break  # and so in all later steps
        right += i / (guesses - i) * (grown - wrong)
        wrong = grown
        if right + wrong > guesses / canaries:
            return True  # neither decreases
    return right + wrong > guesses / canaries


def audit_curve(
    scores: np.ndarray, included: np.ndarray, claim: Claim, significance: float
) -> CurveBound:
    """Test a claimed curve by each of OPTIONS, which share the significance.

    Guarantees: a claim that holds is refuted with at most this probability, however the scores
      depend on each other and on all coins.

    Args:
      scores: [canaries], larger if a canary seems included. Ties are broken by position.
      included: bool [canaries].
      claim: the curve.
      significance: the probability.
    """
    count, tried, each = len(scores), guess_counts(scores, included), significance / len(OPTIONS)
    refuting = [(r, v) for r, v in tried if refutes(count, r, v, claim, each)]
    could = any(refutes(count, r, r, claim, each) for r, _ in tried)
    guesses, correct = refuting[0] if refuting else tried[-1]
    return CurveBound(bool(refuting), could, guesses, correct)


def advantage(claim: Claim) -> float:
    """Largest y - claim(y): the total variation distance that the claim allows."""
    minimum = optimize.minimize_scalar(
        lambda y: claim(y) - y, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10}
    )
    return min(1.0, 1e-9 - float(minimum.fun))  # pyright: ignore


def audit_guesses(
    scores: np.ndarray, included: np.ndarray, claim: Claim, delta: float, significance: float
) -> GuessBound:
    """Test a claimed curve by guessing that the canaries with the larger half of scores took part.

    Guarantees: if each canary's score depends on its own coin alone, as with gradient canaries,
      whose directions have no coordinate in common, a claim that holds is refuted with at most this
      probability.

    Args:
      scores, included, claim: as for `audit_curve`.
      delta: of the claim, for `GuessBound.epsilon`.
      significance: the probability.
    """
    count, correct = guess_counts(scores, included)[-1]
    right = (1 + advantage(claim)) / 2

    def refuted(number: int) -> bool:
        return bool(stats.binom.sf(number - 1, count, right) < significance)

    share = float(stats.beta.ppf(significance, correct, count - correct + 1)) if correct else 0.0
    mu = max(0.0, 2 * float(special.ndtri(share)))
    epsilon = gaussian_epsilon(mu, delta) if mu else 0.0
    return GuessBound(refuted(correct), refuted(count), count, correct, epsilon)


@dataclasses.dataclass(frozen=True)
class NoiseBound:
    """Result of testing the noise in the released numbers."""

    refuted: bool
    claimed: float
    """The claimed noise multiplier."""
    noise_multiplier: float
    """Upper bound on the noise multiplier that was used; below `claimed` if refuted."""
    numbers: int
    """Number of coordinates of all steps."""


class ReleasedNoise:
    """Adds up squares of the releases minus the recorded sums, step by step."""

    def __init__(self) -> None:
        self.squares = 0.0
        """Sum of squares, in clip norms: about sigma^2 for each number, for noise alone."""
        self.numbers = 0
        self.rounded = 0.0
        """Bound on how much rounding to the public lattice shortens a release, for each number, in
        standard deviations of the noise."""
        self._sums: list[np.ndarray] | None = None
        self._rows: list[list[np.ndarray]] = []
        """Rests of the last steps, the newest first, in clip norms."""

    def record_noise(self, add_noise: AddNoise) -> AddNoise:
        """Wrap `add_noise` so that the sums before noise are recorded."""

        def recording(
            sums: list[np.ndarray], *, stddev: float, key: SecretKey, step: int
        ) -> list[np.ndarray]:
            self._sums = sums
            return add_noise(sums, stddev=stddev, key=key, step=step)

        return recording

    def on_release(
        self, gradient: Any, unit: float, coefficients: np.ndarray | None = None
    ) -> None:
        """Record a step's privatised gradient.

        Args:
          unit: size in it of a contribution of one clip norm.
          coefficients: 1, c_1, ... of correlated noise; None for independent noise.
        """
        c = np.ones(1) if coefficients is None else coefficients
        length = float(np.linalg.norm(c))
        row = [np.asarray(leaf, np.float64).ravel() / unit for leaf in jax.tree.leaves(gradient)]
        if self._sums is not None:
            of_sum = 2.0 ** -lattice_bits(sum(leaf.size for leaf in row))
            row = [a - of_sum * b for a, b in zip(row, self._sums, strict=True)]
        self._sums = None
        self._rows = [row, *self._rows][: len(c)]
        for leaves in zip(*self._rows, strict=True):
            fresh = sum(each * leaf for each, leaf in zip(c, leaves, strict=False))
            self.squares += float(np.square(fresh).sum()) / length**2
            self.numbers += leaves[0].size
        # Half a cell of the lattice for each row; twice that covers float32 and whole numbers.
        self.rounded = 2.0**-CELLS_BITS * float(np.abs(c).sum()) / length


def audit_noise(seen: ReleasedNoise, events: Events, significance: float) -> NoiseBound:
    """Test whether the releases minus the sums before noise can be the claimed noise.

    Guarantees: a training with the claimed noise is refuted with at most this probability, whatever
      its sums are, however they depend on earlier releases, and whether or not they were recorded.

    Args:
      seen: the recorded releases.
      events: the claimed events; all steps have one noise multiplier.
      significance: the probability.
    """
    claimed = max(e.noise_multiplier for e, _ in events if isinstance(e, StepEvent))
    least = float(stats.chi2.ppf(significance, seen.numbers))
    longest = math.sqrt(seen.squares) + math.sqrt(seen.numbers) * seen.rounded * claimed
    bound = longest / math.sqrt(least) if least > 0 else math.inf
    return NoiseBound(bound < claimed, claimed, bound, seen.numbers)
