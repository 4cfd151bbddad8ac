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

NOISE, STEPS = "noise_multiplier", "num_steps"
TO_ACCOUNT, TO_CALIBRATE = ("delta", "epsilon"), (NOISE, STEPS)
"""Settings of which a command finds the one that is not given."""


@group(kw_only=True)
class Accounted(MechanismConfig):
    """The mechanism, and all of num_steps, noise_multiplier, epsilon and delta but one."""

    algorithm: Positional[Literal["els", "uls"]]
    """els or uls."""

    sampling_prob: Annotated[float, Field(gt=0, le=1)]
    """p (els) or q (uls): expected share of all examples, or of all users, in a step. In
    [1e-12, 1]."""

    num_steps: Count | None = None
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

    def event(self, noise_multiplier: float | None) -> "StepEvent":
        """The accountant's event of one step.

        Raises:
          ConfigError: with allocation, sampling_prob is no whole number of participations.
        """
        from fedsim import accounting

        assert noise_multiplier is not None, "given or tried"
        prob, steps = self.sampling_prob, self.num_steps
        if self.sampling != ALLOCATION:
            bands, shared = self.bands or 1, self.max_shared_groups
            return accounting.cyclic_event(
                noise_multiplier, prob, self.max_contributions, bands, shared
            )
        assert steps is not None, "with allocation it is not searched for"
        count = self.participations or max(1, round(steps * prob))
        whole = steps % count == 0 and math.isclose(count / steps, prob, rel_tol=1e-9)
        expected = "participations / num_steps, of participations that divide num_steps"
        expect("sampling_prob", prob, whole, expected)
        return accounting.allocated_event(noise_multiplier, steps // count)


def solve(asked: Accounted, names: tuple[str, str], people: int = 1) -> dict[str, Any]:
    """The settings with the one of `names` that is missing, the predicted error of sums of
    gradients (see `noise.correlated`), and facts about the answer: the command's JSON object.

    Args:
      names: TO_ACCOUNT or TO_CALIBRATE.
      people: number of users that epsilon and delta are for together.

    Raises: ConfigError: the settings cannot be combined, or another number is missing.
    """
    from fedsim.noise import predicted_error

    _check(asked, names)
    if names == TO_ACCOUNT:
        facts = {"people": people, **_spent(asked, people)}
    elif asked.num_steps is None:
        facts = _most_steps(asked)
    else:
        facts = _least_noise(asked)
    found = {**vars(asked), **facts}
    bands = (found["bands"] or 1) if asked.noise == CORRELATED else 1
    return {**found, "predicted_error": predicted_error(found[NOISE], found[STEPS], bands)}


def _check(asked: Accounted, names: tuple[str, str]) -> None:
    steps, prob, shared = asked.num_steps, asked.sampling_prob, asked.max_shared_groups
    missing = [name for name in (*TO_ACCOUNT, *TO_CALIBRATE) if getattr(asked, name) is None]
    for name in missing:
        expect(name, None, name in names, "a value")
    one = f"{names[0]} or {names[1]}, and not both"
    expect(names[0], getattr(asked, names[0]), len(missing) == 1, one)
    asked.check_combination(steps)
    els = asked.algorithm == "els"
    expect("sampling", asked.sampling, not els or asked.sampling != ALLOCATION, ONLY_USERS)
    fits = shared == 0 or (not els and asked.sampling_run == "poisson")
    expect("max_shared_groups", shared, fits, "0 but for uls with poisson sampling")
    if (bands := asked.bands) is not None:
        expect("sampling_prob", prob, prob * bands <= 1, f"<= 1 / {bands} bands")
    chosen = bands is not None or asked.noise != CORRELATED or NOISE in missing
    expect("bands", bands, chosen, "a number of bands with correlated noise")
    if asked.before is not None and names == TO_CALIBRATE:
        within = NOISE in missing and asked.before < (asked.epsilon or 0)
        expect("before", asked.before, within, "in (0, epsilon), to find the noise multiplier")


def _spent(asked: Accounted, people: int) -> dict[str, Any]:
    """Epsilon and delta of the steps, and how they were found for several people."""
    from fedsim import accounting

    phases: Any = [(asked.event(asked.noise_multiplier), asked.num_steps)]
    if asked.before is not None:
        phases = [(accounting.PureEvent(asked.before), 1), *phases]
    epsilon, delta = asked.epsilon, asked.delta
    if people > 1 and (asked.sampling == ALLOCATION or asked.noise == CORRELATED):
        if delta is not None:
            epsilon = accounting.group_epsilon(phases, delta, people)
        elif epsilon is not None:
            delta = accounting.group_delta(phases, epsilon, people)
        return {"epsilon": to_json(epsilon), "delta": delta, "how": "group privacy"}
    phases = accounting.for_people(phases, people)
    if delta is not None:
        epsilon = accounting.epsilon(phases, delta)
    elif epsilon is not None:
        delta = accounting.delta(phases, epsilon)
    how = {"how": "theorem"} if people > 1 else {}
    return {"epsilon": to_json(epsilon), "delta": delta, **how}


def _most_steps(asked: Accounted) -> dict[str, Any]:
    """The most steps, and whether more were not looked for."""
    from fedsim import accounting

    expect(STEPS, None, asked.sampling != ALLOCATION, "a number of steps with allocation")
    names = ("epsilon", "delta", NOISE, "sampling_prob", "max_contributions")
    given: dict[str, Any] = {name: getattr(asked, name) for name in names}
    shared, bands = asked.max_shared_groups, asked.bands or 1
    steps = accounting.num_steps(**given, max_changed=shared, bands=bands)
    return {STEPS: steps, "at_least": steps == accounting.MAX_STEPS}


def _least_noise(asked: Accounted) -> dict[str, Any]:
    """The least noise; with correlated noise and no bands given, the bands of the least predicted
    error, too."""
    from fedsim import accounting
    from fedsim.noise import best, predictions

    given: Any = {name: getattr(asked, name) for name in ("epsilon", "delta", STEPS)}
    if asked.before is not None:
        given["before"] = [(accounting.PureEvent(asked.before), 1)]

    def of_bands(bands: int | None) -> float:
        event = dataclasses.replace(asked, bands=bands).event
        return accounting.calibrate_noise(event, **given)

    if asked.noise != CORRELATED or asked.bands is not None:
        return {NOISE: of_bands(asked.bands)}
    chosen = best(predictions(of_bands, given[STEPS], int(1 / asked.sampling_prob)))
    return {NOISE: chosen.noise_multiplier, "bands": chosen.bands}


def account(asked: Accounted, people: int = 1) -> Answer:
    """Compute the user-level epsilon of a training at a delta, or its delta at an epsilon.

    Args:
      people: k: number of users that the answer is for, all of them together, if they were named
        before anybody saw a release. For users chosen by looking, multiply delta by the number of
        sets that could be chosen. >= 1.
    """
    from fedsim.accounting import at_most

    answer = solve(asked, TO_ACCOUNT, people)
    epsilon, delta = float(answer["epsilon"]), answer["delta"]
    many = f" for {people:,} users together, by {answer['how']}" if people > 1 else ""
    return answer, [f"epsilon {at_most(epsilon, '.6g')} at delta {at_most(delta, '.3e')}{many}"]


def calibrate(asked: Accounted) -> Answer:
    """Find the setting that meets a user-level (epsilon, delta): give num_steps or
    noise_multiplier. The answer is the smallest noise multiplier, or the largest number of steps.
    """
    from fedsim.accounting import at_most

    answer = solve(asked, TO_CALIBRATE)
    if asked.num_steps is None:
        more = " or more (nothing above is looked for)" if answer["at_least"] else ""
        return answer, [f"num steps {answer[STEPS]}{more}"]
    bands = f" with {answer['bands']} bands" if answer["bands"] else ""
    # Rounded so that a run by it claims no more than was asked for.
    return answer, [f"noise multiplier {at_most(answer[NOISE], '.6g')}{bands}"]
