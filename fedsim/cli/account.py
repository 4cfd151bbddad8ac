"""`fedsim account`, `fedsim calibrate`: privacy without a training."""

import dataclasses
import math
import sys
from typing import Any, Literal

import tyro

from fedsim.config import to_json
from fedsim.config.privacy import (
    ALLOCATION,
    COMPARISON_ONLY,
    CORRELATED,
    ONLY_USERS,
    SHUFFLE,
    expect_cell,
    sampling_of,
)
from fedsim.errors import expect

AlgorithmName = tyro.conf.Positional[Literal["els", "uls"]]
SamplingName = Literal["poisson", "cyclic", "allocation", "shuffle"] | None
NoiseName = Literal["independent", "correlated"]


@dataclasses.dataclass(frozen=True)
class Account:
    """User-level epsilon of a training run, or its delta."""

    algorithm: AlgorithmName
    """els or uls."""

    num_steps: int
    """T: number of steps. In [1, 10000000]."""

    sampling_prob: float
    """p (ELS) or q (ULS): the share of all examples, or of all users, that is expected in a step.
    In [1e-12, 1]."""

    noise_multiplier: float
    """sigma: standard deviation of the noise on the sum, in units of its sensitivity. In
    [1e-10, 1e10]."""

    group_size: int = 1
    """G_ELS: most examples of a user in the pool. ULS's epsilon does not depend on it. In
    [1, 10000000]."""

    max_changed: int = 0
    """k of ULS where texts have several owners: most groups of others with a user's texts. In
    [0, 10000000]."""

    sampling: SamplingName = None
    """The same flag as that of train."""

    noise: NoiseName = "independent"
    """The same flag as that of train."""

    bands: int | None = None
    """The same flag as that of train; asked for with correlated noise, unless it is to be found."""

    participations: int | None = None
    """The same flag as that of train. Default: what sampling_prob asks for."""

    before: float | None = None
    """Epsilon of an (epsilon, 0)-DP release before the first step, such as a group size that was
    chosen privately; composed with the steps. > 0."""

    delta: float | None = None
    """In (0, 1): print epsilon at this delta."""

    epsilon: float | None = None
    """>= 0: print delta at this epsilon."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim import accounting
        from fedsim.accounting.rounding import at_most

        expect("num_steps", self.num_steps, self.num_steps >= 1, ">= 1")
        given = (self.delta is None) + (self.epsilon is None)
        expect("delta", self.delta, given == 1, "a delta or an epsilon, and not both")
        share = self.before
        expect("before", share, share is None or 0 < share < math.inf, "> 0 and finite")
        event = accounting.cyclic_event(
            self.noise_multiplier, self.sampling_prob, _max_contributions(self), _bands(self)
        )
        if self.sampling == ALLOCATION:
            event = accounting.allocated_event(self.noise_multiplier, _window(self))
        event = dataclasses.replace(event, max_changed=_max_changed(self))
        phases: list[tuple[accounting.Event, int]] = [(event, self.num_steps)]
        if self.before is not None:
            phases.insert(0, (accounting.PureEvent(self.before), 1))
        epsilon, delta = self.epsilon, self.delta
        if delta is not None:
            epsilon = accounting.epsilon(phases, delta, progress=_progress)
        elif epsilon is not None:
            delta = accounting.delta(phases, epsilon, progress=_progress)
        if epsilon == math.inf:
            _progress(f"delta={delta}: too small for an answer{_enough(phases)}")
        if not self.json:
            assert epsilon is not None and delta is not None, "one is given, the other found"
            found = f"epsilon {at_most(epsilon, '.6g')} at delta {at_most(delta, '.3e')}"
            print(", ".join([found, *_label(self).values()]))
        return {
            **_without_json(self),
            "epsilon": to_json(epsilon),
            "delta": delta,
            **_label(self),
            "predicted_error": _predicted(self, self.num_steps, self.noise_multiplier),
        }


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """What meets a user-level (epsilon, delta): the smallest noise multiplier, given num-steps and
    sampling-prob; or, given the noise multiplier and one of these, the most that the other may be.
    """

    algorithm: AlgorithmName
    """els or uls."""

    epsilon: float
    """Target. > 0."""

    delta: float
    """Target. In (0, 1)."""

    num_steps: int | None = None
    """T: number of steps. In [1, 10000000]."""

    sampling_prob: float | None = None
    """p (ELS) or q (ULS): the share of all examples, or of all users, that is expected in a step.
    In [1e-12, 1]."""

    noise_multiplier: float | None = None
    """sigma: standard deviation of the noise on the sum, in units of its sensitivity. In
    [1e-10, 1e10]."""

    group_size: int = 1
    """G_ELS: most examples of a user in the pool. ULS's noise does not depend on it. In
    [1, 10000000]."""

    max_changed: int = 0
    """k of ULS where texts have several owners: most groups of others with a user's texts. In
    [0, 10000000]."""

    sampling: SamplingName = None
    """The same flag as that of train."""

    noise: NoiseName = "independent"
    """The same flag as that of train."""

    bands: int | None = None
    """The same flag as that of train; asked for with correlated noise, unless it is to be found."""

    participations: int | None = None
    """The same flag as that of train. Default: what sampling_prob asks for."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim import accounting
        from fedsim.accounting.rounding import at_least, at_most

        names = ("num_steps", "sampling_prob", "noise_multiplier")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        wanted = next((name for name in reversed(names) if name not in given), names[-1])
        expect(
            wanted,
            getattr(self, wanted),
            len(given) == 2,
            "two of num_steps, sampling_prob and noise_multiplier, to find the third",
        )
        cap, target = _max_contributions(self), {"epsilon": self.epsilon, "delta": self.delta}
        target |= {"max_contributions": cap, "progress": _progress, **given}
        if changed := _max_changed(self):
            target["max_changed"] = changed
        if wanted == "noise_multiplier" and self.noise == CORRELATED and self.bands is None:
            return self._with_best_bands(target)
        bands = _bands(self)
        if self.sampling == ALLOCATION:
            asked = "num_steps and sampling_prob with allocation, to find the noise multiplier"
            expect(wanted, None, wanted == "noise_multiplier", asked)
            window, whole = _window(self), {**target, "num_steps": self.num_steps}
            for name in ("sampling_prob", "max_contributions"):
                del whole[name]
            found = accounting.calibrate_noise(
                lambda sigma: accounting.allocated_event(sigma, window), **whole
            )
        else:
            found = getattr(accounting, wanted)(bands=bands, **target)
        at_least_so_many = wanted == "num_steps" and found == accounting.MOST_STEPS
        if not self.json:
            shown = found
            if wanted != "num_steps":  # by which a run would claim no more than was asked for
                rounded = at_least if wanted == "sampling_prob" else at_most
                shown = rounded(found, ".6g")
            more = " or more (nothing above is looked for)" * at_least_so_many
            print(", ".join([f"{wanted.replace('_', ' ')} {shown}{more}", *_label(self).values()]))
        whole = {**given, wanted: found}
        error = _predicted(self, whole["num_steps"], whole["noise_multiplier"])
        result = {**_without_json(self), wanted: found, **_label(self), "predicted_error": error}
        return {**result, "at_least": at_least_so_many} if wanted == "num_steps" else result

    def _with_best_bands(self, target: dict[str, Any]) -> dict[str, Any]:
        """The noise multiplier of the number of bands with the least predicted error."""
        from fedsim import accounting
        from fedsim.accounting.rounding import at_most
        from fedsim.noise.toeplitz import best, predictions

        _bands(dataclasses.replace(self, bands=1))
        steps, prob = target["num_steps"], target["sampling_prob"]
        expect("num_steps", steps, steps >= 1, ">= 1")
        expect("sampling_prob", prob, 0 < prob <= 1, "in (0, 1]")
        found = predictions(
            lambda bands: accounting.noise_multiplier(bands=bands, **target), steps, int(1 / prob)
        )
        chosen, one = best(found), found[0]
        if not self.json:
            ratio = chosen.error / one.error
            bands = f"{chosen.bands} bands: {ratio:.3g} times the error of independent noise"
            print(f"noise multiplier {at_most(chosen.noise_multiplier, '.6g')} with {bands}")
        return {
            **_without_json(self),
            "bands": chosen.bands,
            "noise_multiplier": chosen.noise_multiplier,
            "predicted_error": chosen.error,
        }


def _max_contributions(command: Account | Calibrate) -> int:
    """G_ELS is the cap of a user's contributions; G_ULS must never reach the accountant."""
    from fedsim.accounting import MOST_CONTRIBUTIONS

    within = 1 <= command.group_size <= MOST_CONTRIBUTIONS
    expect("group_size", command.group_size, within, f"in [1, {MOST_CONTRIBUTIONS}]")
    return command.group_size if command.algorithm == "els" else 1


def _max_changed(command: Account | Calibrate) -> int:
    """k of ULS."""
    changed, algorithm = command.max_changed, command.algorithm
    sampling = sampling_of(command.sampling, command.noise)
    holds = changed == 0 or (algorithm, sampling) == ("uls", "poisson")
    expect("max_changed", changed, holds, f"0 with {algorithm} and {sampling} sampling")
    return changed


def _bands(command: Account | Calibrate) -> int:
    """b of cyclic sampling; one group of all users otherwise."""
    cell = sampling_of(command.sampling, command.noise), command.noise
    own = {"bands": command.bands, "participations": command.participations}
    expect_cell(*cell, **own, num_steps=command.num_steps)
    els = command.algorithm == "els" and command.sampling == ALLOCATION
    expect("sampling", command.sampling, not els, ONLY_USERS)
    given = command.noise != CORRELATED or command.bands is not None
    expect("bands", command.bands, given, "a number of bands with correlated noise")
    bands, prob = command.bands or 1, command.sampling_prob
    expect("sampling_prob", prob, prob is None or prob > 0, "in (0, 1]")
    most = f"<= {1 / bands:g}: a step draws from one of {bands} groups of users"
    if prob is not None and prob <= 1:
        expect("sampling_prob", prob, prob * bands <= 1, most)
    return bands


def _window(command: Account | Calibrate) -> int:
    """W of random allocation. Raises ConfigError: no whole number of participations."""
    steps, prob = command.num_steps or 1, command.sampling_prob or 0.0
    count = command.participations or max(1, round(steps * prob))
    whole = steps % count == 0 and math.isclose(count / steps, prob, rel_tol=1e-9)
    expected = "participations / num_steps, of participations that divide num_steps"
    expect("sampling_prob", prob, whole, expected)
    return steps // count


def _enough(phases: Any) -> str:
    """A delta for which there is an answer: with many steps more is unresolved than with few."""
    from fedsim import accounting

    for power in range(-15, 0):
        if accounting.epsilon(phases, 10.0**power) < math.inf:
            return f": nothing below about 1e{power} is resolved here; try --delta 1e{power}"
    return ""


def _label(command: Account | Calibrate) -> dict[str, str]:
    """What makes epsilon no guarantee, under the name that it has everywhere; else nothing."""
    return {"epsilon_holds": COMPARISON_ONLY} if command.sampling == SHUFFLE else {}


def _without_json(command: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(command)
    del fields["json"]
    return fields


def _predicted(command: Account | Calibrate, steps: int, noise_multiplier: float) -> float:
    """The predicted error; see `noise.toeplitz`."""
    from fedsim.noise.toeplitz import predicted_error

    bands = (command.bands or 1) if command.noise == CORRELATED else 1
    return predicted_error(noise_multiplier, steps, bands)


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
