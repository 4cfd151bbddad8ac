"""`fedsim account`, `fedsim calibrate`: the accountant on the command line, without any data."""

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, Literal, Self

from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    ONLY_USERS,
    MechanismConfig,
    Positional,
    group,
    to_json,
)
from fedsim.errors import expect, expect_positive

if TYPE_CHECKING:
    from fedsim.accounting import Events, StepEvent

NOISE = "noise_multiplier"


@group(kw_only=True)
class _Mechanism(MechanismConfig):
    """The mechanism, and what both commands compute from it."""

    algorithm: Positional[Literal["els", "uls"]]
    """els or uls."""

    participations: int | None = None
    """K: with random allocation, the number of steps that each user takes part in. Divides
    num_steps. Default: sampling_prob * num_steps."""

    bands: int | None = None
    """b: number of groups of users in cyclic sampling, which is also how many steps the noise of a
    step affects. In [1, num_steps]; at most 1 / sampling_prob. Required with correlated noise,
    except when the noise multiplier is to be found."""

    group_size: int = 1
    """G_ELS: largest number of a user's examples in the pool. The epsilon of uls does not depend on
    it. In [1, 10000000]."""

    max_shared_groups: int = 0
    """k: with uls and texts of several owners, the largest number of other users' groups that
    contain texts of one user. In [0, 10000000]."""

    @property
    def max_contributions(self) -> int:
        """Largest number of a user's units in a step: G_ELS, or 1. G_ULS must never reach the
        accountant, because uls clips the mean gradient of a user's group as one unit."""
        return self.group_size if self.algorithm == "els" else 1

    def expect_accountable(self, num_steps: int | None, sampling_prob: float | None) -> None:
        """Check that the settings can be combined.

        Args:
          num_steps, sampling_prob: None for the one that is to be found.

        Raises:
          ConfigError: they cannot.
        """
        from fedsim.accounting import MAX_CONTRIBUTIONS

        for name, least in (("group_size", 1), ("max_shared_groups", 0)):
            within = least <= (value := getattr(self, name)) <= MAX_CONTRIBUTIONS
            expect(name, value, within, f"in [{least}, {MAX_CONTRIBUTIONS}]")
        self.check_combination(num_steps)
        els = self.algorithm == "els" and self.sampling == ALLOCATION
        expect("sampling", self.sampling, not els, ONLY_USERS)
        changes = self.algorithm == "uls" and self.sampling_run == "poisson"
        why = f"0 with {self.algorithm} and {self.sampling_run} sampling"
        expect(
            "max_shared_groups", self.max_shared_groups, self.max_shared_groups == 0 or changes, why
        )
        if sampling_prob is not None:
            expect("sampling_prob", sampling_prob, 0 < sampling_prob <= 1, "in (0, 1]")
            bands = self.bands or 1
            most = f"<= {1 / bands:g}: a step draws from one of {bands} groups of users"
            expect("sampling_prob", sampling_prob, sampling_prob * bands <= 1, most)

    def expect_bands(self) -> None:
        """Raise ConfigError for correlated noise without a number of bands."""
        holds = self.noise != CORRELATED or self.bands is not None
        expect("bands", self.bands, holds, "a number of bands with correlated noise")

    def event(self, noise_multiplier: float, sampling_prob: float, num_steps: int) -> "StepEvent":
        """The accountant's event of one step.

        Raises:
          ConfigError: with allocation, sampling_prob is no whole number of participations.
        """
        from fedsim import accounting

        if self.sampling != ALLOCATION:
            return accounting.cyclic_event(
                noise_multiplier,
                sampling_prob,
                self.max_contributions,
                self.bands or 1,
                self.max_shared_groups,
            )
        steps = num_steps or 1  # of none, the accountant says that there are none
        count = self.participations or max(1, round(steps * sampling_prob))
        whole = steps % count == 0 and math.isclose(count / steps, sampling_prob, rel_tol=1e-9)
        expected = "participations / num_steps, of participations that divide num_steps"
        expect("sampling_prob", sampling_prob, whole, expected)
        return accounting.allocated_event(noise_multiplier, steps // count)

    def answer(self, num_steps: int, noise_multiplier: float, **found: Any) -> dict[str, Any]:
        """The command's JSON object: settings, `found`, and the predicted error of sums of
        gradients (see `noise.correlated`)."""
        from fedsim.noise import predicted_error

        bands = (self.bands or 1) if self.noise == CORRELATED else 1
        error = predicted_error(noise_multiplier, num_steps, bands)
        return {**vars(self), **found, "predicted_error": error}


@group(kw_only=True)
class Account(_Mechanism):
    """The training, and the answer of `fedsim account`."""

    num_steps: int
    """T: number of steps. In [1, 10000000]."""

    sampling_prob: float
    """p (els) or q (uls): expected share of all examples, or of all users, in a step. In
    [1e-12, 1]."""

    noise_multiplier: float
    """sigma: standard deviation of the noise on the sum, in units of its sensitivity. In
    [1e-10, 1e10]."""

    before: float | None = None
    """Epsilon of a pure DP release before the first step, such as a privately chosen group size. It
    is composed with the steps. > 0."""

    delta: float | None = None
    """Print epsilon at this delta. In (0, 1)."""

    epsilon: float | None = None
    """Print delta at this epsilon. >= 0."""

    people: int = 1
    """k: number of users that the answer is for, all of them together, if they were named before
    anybody saw a release. For users chosen by looking, multiply delta by the number of sets that
    could be chosen. >= 1."""

    def solve(self) -> tuple[dict[str, Any], str]:
        """The JSON object, and a line about it."""
        from fedsim import accounting
        from fedsim.accounting import at_most

        expect("num_steps", self.num_steps, self.num_steps >= 1, ">= 1")
        one = (self.delta is None) != (self.epsilon is None)
        expect("delta", self.delta, one, "a delta or an epsilon, and not both")
        expect_positive(self, "before")
        self.expect_accountable(self.num_steps, self.sampling_prob)
        self.expect_bands()
        event = self.event(self.noise_multiplier, self.sampling_prob, self.num_steps)
        events: Events = [(event, self.num_steps)]
        if self.before is not None:
            events = [(accounting.PureEvent(self.before), 1), *events]
        epsilon, delta = self.epsilon, self.delta
        by_group = self.people > 1 and (self.sampling == ALLOCATION or self.noise == CORRELATED)
        together = events if by_group else accounting.for_people(events, self.people)
        if delta is not None:
            epsilon = (
                accounting.group_epsilon(events, delta, self.people)
                if by_group
                else accounting.epsilon(together, delta, progress=_progress)
            )
        else:
            assert epsilon is not None, "one of them is there"
            delta = (
                accounting.group_delta(events, epsilon, self.people)
                if by_group
                else accounting.delta(together, epsilon, progress=_progress)
            )
        if epsilon == math.inf:
            larger = "" if by_group else _least_delta(together)
            _progress(f"delta={delta}: too small for an answer{larger}")
        spent = f"epsilon {at_most(epsilon, '.6g')} at delta {at_most(delta, '.3e')}"
        if self.people > 1:
            spent += f" for {self.people:,} users together, named before any release"
        spent += ", by group privacy, which is not tight" * by_group
        found = {"epsilon": to_json(epsilon), "delta": delta}
        if self.people > 1:
            found["how"] = "group privacy" if by_group else "theorem"
        return self.answer(self.num_steps, self.noise_multiplier, **found), spent


@group(kw_only=True)
class Calibrate(_Mechanism):
    """The target, and the answer of `fedsim calibrate`."""

    epsilon: float
    """Target epsilon. > 0."""

    delta: float
    """Target delta. In (0, 1)."""

    sampling_prob: float
    """p (els) or q (uls): expected share of all examples, or of all users, in a step. In
    [1e-12, 1]."""

    num_steps: int | None = None
    """T: number of steps. In [1, 10000000]."""

    noise_multiplier: float | None = None
    """sigma: standard deviation of the noise on the sum, in units of its sensitivity. In
    [1e-10, 1e10]."""

    before: float | None = None
    """Part of epsilon that is spent before the first step, on the private median of els. In
    (0, epsilon). Only to find the noise multiplier."""

    def solve(self) -> tuple[dict[str, Any], str]:
        """The JSON object, and a line about it."""
        from fedsim.accounting import MAX_STEPS, at_most

        wanted, share = self._unknown(), self.before
        within = share is None or (0 < share < self.epsilon and wanted == NOISE)
        expect("before", share, within, "in (0, epsilon), to find the noise multiplier")
        self.expect_accountable(self.num_steps, self.sampling_prob)
        solved, note = self._with_noise() if wanted == NOISE else (self._with_most_steps(), "")
        steps, noise = solved.num_steps, solved.noise_multiplier
        assert steps is not None and noise is not None, "one given, one found"
        is_bound = wanted == "num_steps" and steps == MAX_STEPS
        shown = {  # rounded so that a run by it claims no more than was asked for
            "num_steps": f"{steps}{' or more (nothing above is looked for)' * is_bound}",
            NOISE: f"{at_most(noise, '.6g')}{note}",
        }
        bound = {"at_least": is_bound} if wanted == "num_steps" else {}
        line = f"{wanted.replace('_', ' ')} {shown[wanted]}"
        return {**solved.answer(steps, noise), **bound}, line

    def _unknown(self) -> str:
        """The name of the one setting that is to be found."""
        missing = [name for name in ("num_steps", NOISE) if getattr(self, name) is None]
        wanted = missing[-1] if missing else NOISE
        expected = "one of num_steps and noise_multiplier, to find the other"
        expect(wanted, getattr(self, wanted), len(missing) == 1, expected)
        return wanted

    def _with_most_steps(self) -> Self:
        """These settings with the most steps."""
        from fedsim import accounting

        self.expect_bands()
        expected = "num_steps with allocation, to find the noise multiplier"
        expect("num_steps", None, self.sampling != ALLOCATION, expected)
        assert self.noise_multiplier is not None, "given"
        steps = accounting.num_steps(
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sampling_prob=self.sampling_prob,
            max_contributions=self.max_contributions,
            max_changed=self.max_shared_groups,
            bands=self.bands or 1,
            progress=_progress,
        )
        return dataclasses.replace(self, num_steps=steps)

    def _with_noise(self) -> tuple[Self, str]:
        """These settings with the least noise, and a note on the bands if they were chosen here:
        with correlated noise and no bands given, those of the least predicted error."""
        from fedsim import accounting
        from fedsim.noise import best, predictions

        steps, prob = self.num_steps, self.sampling_prob
        assert steps is not None, "given"

        def least_noise(bands: int | None) -> float:
            mechanism = dataclasses.replace(self, bands=bands)
            return accounting.calibrate_noise(
                lambda sigma: mechanism.event(sigma, prob, steps),
                epsilon=self.epsilon,
                delta=self.delta,
                num_steps=steps,
                before=[(accounting.PureEvent(self.before), 1)] if self.before else [],
                progress=_progress,
            )

        if self.noise != CORRELATED or self.bands is not None:
            return dataclasses.replace(self, noise_multiplier=least_noise(self.bands)), ""
        expect("num_steps", steps, steps >= 1, ">= 1")
        expect("sampling_prob", prob, prob <= 1, "in (0, 1]")
        candidates = predictions(least_noise, steps, int(1 / prob))
        chosen, independent = best(candidates), candidates[0]
        ratio = chosen.error / independent.error
        note = f" with {chosen.bands} bands: {ratio:.3g} times the error of independent noise"
        return dataclasses.replace(
            self, bands=chosen.bands, noise_multiplier=chosen.noise_multiplier
        ), note


def account(asked: Account, json: bool = False) -> dict[str, Any]:
    """Compute the user-level epsilon of a training at a delta, or its delta at an epsilon.

    Args:
      json: Print one JSON object on stdout.
    """
    return _shown(asked, json)


def calibrate(asked: Calibrate, json: bool = False) -> dict[str, Any]:
    """Find the setting that meets a user-level (epsilon, delta): give num_steps or
    noise_multiplier. The answer is the smallest noise multiplier, or the largest number of steps.

    Args:
      json: Print one JSON object on stdout.
    """
    return _shown(asked, json)


def _shown(asked: Account | Calibrate, json: bool) -> dict[str, Any]:
    answer, line = asked.solve()
    if not json:
        print(line)
    return answer


def _least_delta(events: "Events") -> str:
    """Advice on a delta that the accountant resolves: with more steps, it resolves fewer."""
    from fedsim import accounting

    for power in range(-15, 0):
        if accounting.epsilon(events, 10.0**power) < math.inf:
            return f": nothing below about 1e{power} is resolved here; try delta=1e{power}"
    return ""


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
