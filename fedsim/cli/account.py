"""`fedsim account`, `fedsim calibrate`: the accountant on the command line, without any data."""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fedsim.cli import Answer
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    ONLY_USERS,
    Count,
    MechanismConfig,
    Positional,
    Positive,
    group,
    to_json,
)
from fedsim.errors import expect

if TYPE_CHECKING:
    from fedsim.accounting import StepEvent


NEEDED = {False: "a value", True: "none: it is what is looked for"}


@group(kw_only=True)
class Accounted(MechanismConfig):
    """The mechanism, and two of noise_multiplier, epsilon and delta."""

    algorithm: Positional[Literal["els", "uls"]]
    """els or uls."""

    sampling_prob: Annotated[float, Field(gt=0, le=1)]
    """p (els) or q (uls): expected share of all examples, or of all users, in a step. In
    [1e-12, 1]."""

    num_steps: Count
    """T: number of steps. In [1, 10000000]."""

    noise_multiplier: float | None = None
    """sigma: standard deviation of the noise on the sum, in units of its sensitivity. In
    [1e-10, 1e10]."""

    epsilon: float | None = None
    """Epsilon of the training. >= 0."""

    delta: float | None = None
    """Delta of the training. In (0, 1)."""

    before: Positive | None = None
    """Epsilon of a pure DP release before the first step, such as a privately chosen group size. It
    is composed with the steps. > 0."""

    group_size: Annotated[int, Field(ge=1, le=10**7)] = 1
    """G_ELS: largest number of a user's examples in the pool. The epsilon of uls does not depend on
    it. In [1, 10000000]."""

    max_shared_groups: Annotated[int, Field(ge=0, le=10**7)] = 0
    """k: with uls and texts of several owners, the largest number of other users' groups that
    contain texts of one user. In [0, 10000000]."""

    @property
    def max_contributions(self) -> int:
        """Largest number of a user's units in a step: G_ELS, or 1. G_ULS must never reach the
        accountant, because uls clips the mean gradient of a user's group as one unit."""
        return self.group_size if self.algorithm == "els" else 1

    def event(self, noise_multiplier: float) -> "StepEvent":
        """The accountant's event of one step.

        Raises:
          ConfigError: with allocation, sampling_prob is no whole number of participations.
        """
        from fedsim import accounting

        prob, steps = self.sampling_prob, self.num_steps
        if self.sampling != ALLOCATION:
            bands, shared = self.bands or 1, self.max_shared_groups
            return accounting.cyclic_event(
                noise_multiplier, prob, self.max_contributions, bands, shared
            )
        count = self.participations or max(1, round(steps * prob))
        whole = steps % count == 0 and math.isclose(count / steps, prob, rel_tol=1e-9)
        expected = "participations / num_steps, of participations that divide num_steps"
        expect("sampling_prob", prob, whole, expected)
        return accounting.allocated_event(noise_multiplier, steps // count)

    def check(self, missing: str) -> None:
        """Raise ConfigError if the settings cannot be combined, or anything but `missing` is to be
        found."""
        for name in ("noise_multiplier", "epsilon", "delta"):
            there = getattr(self, name) is not None
            expect(name, getattr(self, name), there == (name != missing), NEEDED[there])
        prob, shared, bands = self.sampling_prob, self.max_shared_groups, self.bands
        self.check_combination(self.num_steps)
        els = self.algorithm == "els"
        expect("sampling", self.sampling, not els or self.sampling != ALLOCATION, ONLY_USERS)
        fits = shared == 0 or (not els and self.sampling_run == "poisson")
        expect("max_shared_groups", shared, fits, "0 but for uls with poisson sampling")
        if bands is not None:
            expect("sampling_prob", prob, prob * bands <= 1, f"<= 1 / {bands} bands")
        chosen = bands is not None or self.noise != CORRELATED or self.noise_multiplier is None
        expect("bands", bands, chosen, "a number of bands with correlated noise")


def account(asked: Accounted, people: int = 1) -> Answer:
    """Compute the user-level epsilon of a training at a delta, or its delta at an epsilon.

    Args:
      people: k: number of users that the answer is for, all of them together, if they were named
        before anybody saw a release. For users chosen by looking, multiply delta by the number of
        sets that could be chosen. >= 1.
    """
    from fedsim import accounting
    from fedsim.accounting import at_most

    epsilon, delta = asked.epsilon, asked.delta
    asked.check("epsilon" if delta is not None else "delta")
    assert asked.noise_multiplier is not None
    phases: Any = [(asked.event(asked.noise_multiplier), asked.num_steps)]
    if asked.before is not None:
        phases = [(accounting.PureEvent(asked.before), 1), *phases]
    how, by_group = {}, asked.sampling == ALLOCATION or asked.noise == CORRELATED
    if people > 1:
        how = {"how": "group privacy" if by_group else "theorem"}
    if people > 1 and by_group:
        expect("delta", delta, delta is not None, "a delta, for several people with this mechanism")
        epsilon = accounting.group_epsilon(phases, delta or 0.0, people)
    else:
        phases = accounting.for_people(phases, people)
        if delta is not None:
            epsilon = accounting.epsilon(phases, delta)
        elif epsilon is not None:
            delta = accounting.delta(phases, epsilon)
    assert epsilon is not None and delta is not None
    answer = {**vars(asked), "epsilon": to_json(epsilon), "delta": delta, "people": people, **how}
    many = f" for {people:,} users together, by {answer['how']}" if people > 1 else ""
    return answer, [f"epsilon {at_most(epsilon, '.6g')} at delta {at_most(delta, '.3e')}{many}"]


def calibrate(asked: Accounted) -> Answer:
    """Find the smallest noise multiplier that meets a user-level (epsilon, delta).

    With correlated noise and no bands given, also the bands of the least predicted error.
    """
    from fedsim import accounting
    from fedsim.accounting import at_most
    from fedsim.noise import best, predictions

    asked.check("noise_multiplier")
    given: Any = {name: getattr(asked, name) for name in ("epsilon", "delta", "num_steps")}
    if (before := asked.before) is not None:
        expect("before", before, before < given["epsilon"], "in (0, epsilon)")
        given["before"] = [(accounting.PureEvent(before), 1)]

    def of_bands(bands: int | None) -> float:
        event = dataclasses.replace(asked, bands=bands).event
        return accounting.calibrate_noise(event, **given)

    if asked.noise == CORRELATED and asked.bands is None:
        chosen = best(predictions(of_bands, asked.num_steps, int(1 / asked.sampling_prob)))
        found = {"noise_multiplier": chosen.noise_multiplier, "bands": chosen.bands}
    else:
        found = {"noise_multiplier": of_bands(asked.bands)}
    answer = {**vars(asked), **found}
    bands = f" with {answer['bands']} bands" if answer["bands"] else ""
    # Rounded so that a run by it claims no more than was asked for.
    return answer, [f"noise multiplier {at_most(answer['noise_multiplier'], '.6g')}{bands}"]
