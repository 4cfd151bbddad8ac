"""The public constants of a run: fixed before its first step, never recomputed from a draw."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedsim.accounting import Slack, StepEvent, allocated_event, cyclic_event
from fedsim.accounting.pure_dp import PureEvent
from fedsim.clipping import Clip
from fedsim.clipping.clip import lattice_bits
from fedsim.clipping.step_releases import AdaptiveClip, NoisyLoss
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, to_json
from fedsim.config.privacy import COMPARISON_ONLY, CORRELATED, INDEPENDENT
from fedsim.noise import CELL_ERRORS, AddNoise, Correlated, add_gaussian, slack
from fedsim.noise.correlated import Strategy, strategy
from fedsim.plan.evaluations import Evaluations

SHARED = "shared"
ADJACENCY = {
    ZERO_OUT: "zero out one user's texts, the number of users being public",
    ADD_OR_REMOVE: "add or remove one user",
    SHARED: "zero out all texts that one user owns, alone or with others, who owns which being "
    "public and fixed",
}
REPRODUCTION = "of a seed that others may know or guess: a reproduction, not a guarantee"
TRIAL = "of one trial of a private selection, which costs more: not a guarantee"
UNPROVEN = "with a strategy whose bound on contributions is not proven: not a guarantee"
"""Of earlier versions, which had such strategies."""


def holds(plan: Mapping[str, Any]) -> str:
    """What epsilon holds under: the adjacency, or a label that says that it is no guarantee.

    Args: plan: the fields of a plan.
    """
    return label_of(plan) or ADJACENCY[SHARED if plan.get("shared") else plan["adjacency"]]


def label_of(plan: Mapping[str, Any]) -> str:
    """What makes epsilon no guarantee; empty where nothing does.

    Args: plan: the fields of a plan, or a summary, which has them, too.
    """
    labels = [COMPARISON_ONLY] if plan["sampling_run"] != plan["sampling_accounted"] else []
    if (assumed_population := plan.get("assumed_population")) is not None:
        assumed = f"as if there were {assumed_population:,} users"
        labels.append(f"{assumed}: an assumption, not a guarantee")
    labels += [UNPROVEN] if plan.get("unproven") else []
    labels += [TRIAL] if plan.get("trial") else []
    labels += [REPRODUCTION] if plan.get("seeded") else []
    return "; ".join(labels)


LEFT_OUT_AT_DEFAULTS = (
    *("planted", "shared", "bands", "noise", "participations", "trial", "loss_bound"),
    *("evaluations", "drawn_once", "unproven"),
)
"""Fields of a plan that are written down where they are not at their defaults."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will do, and what it will be able to claim."""

    algorithm: Algorithm
    num_users: int
    num_examples: int
    num_units: int
    """Sampling units: the |D_sub| examples of the pool for ELS, the users for ULS."""
    num_steps: int
    budget: int
    group_size: int
    expected_count: int
    """B (examples) for ELS, M (users) for ULS."""
    sampling_prob: float
    sampling_run: str
    sampling_accounted: str
    clip_norm: float
    clipping: str
    target_epsilon: float
    delta: float
    noise_multiplier: float
    num_parameters: int
    data_seal: str
    """Keyed digest of the data's fingerprint: says to the key's owner whether data are the same."""
    non_private: tuple[str, ...]
    """What the guarantee does not cover: read off the data, or known to others."""
    group_size_epsilon: float | None = None
    """What choosing the group size privately cost; part of target_epsilon."""
    clip_quantile: float | None = None
    """What clip_norm, the first step's, is moved towards; None: it stays."""
    loss_bound: float | None = None
    """Up to which the training loss of each step is released, with noise; None: it is not."""
    assumed_population: int | None = None
    """How many users are accounted for; None: those there are."""
    adjacency: str = ADD_OR_REMOVE
    """zero-out or add-or-remove."""
    seeded: bool = False
    """Whether the key came from a seed: such a run reproduces another one, and claims nothing."""
    unproven: str | None = None
    """The strategy, where an earlier version had it and this one has not, because contributions are
    not proven to be at most C."""
    bands: int = 1
    """b: groups of users that steps draw from in turn, and steps that noise reaches."""
    participations: int | None = None
    """K of random allocation: steps that each user takes part in."""
    noise: str = INDEPENDENT
    """independent or correlated."""
    predicted_error: float = math.nan
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity; see `noise.toeplitz`."""
    shared: dict[str, Any] | None = None
    """Where texts have several owners: owner sets, texts with several owners, texts that the bounds
    kept and left out, k (max_changed), and a seal of what they kept. None: each has one."""
    trial: bool = False
    """Whether the run is a trial of a private selection, which is what is counted and released."""
    evaluations: Evaluations | None = None
    """What is released of held-out users while the run trains; None: nothing with noise."""
    planted: dict[str, int] | None = None
    """How many canaries of each kind an audit tossed coins for. The run of an audit is none to
    release. None: it is no audit."""
    drawn_once: str = ""
    """A seal of what was drawn once for several steps; see `plan.drawn_once`."""

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal. Lists take math.nan for itself; what dataclasses generate
        does not from Python 3.13 on."""
        return isinstance(other, Plan) and [*vars(self).values()] == [*vars(other).values()]

    @property
    def clip(self) -> Clip:
        """The clip function of the first step, with its sensitivity."""
        return self.clip_at(self.clip_norm)

    def clip_at(self, clip_norm: float) -> Clip:
        """The clip function with another norm."""
        return Clip(clip_norm, self.clipping == "normalised", in_float32=not self.noise_multiplier)

    @property
    def adaptive(self) -> AdaptiveClip | None:
        """How the clip norm moves, or None if it stays."""
        if self.clip_quantile is None:
            return None
        return AdaptiveClip(self.clip_quantile, self.expected_count, self.noise_multiplier)

    @property
    def gradient_noise_multiplier(self) -> float:
        """The multiplier of the noise on the gradient: noise_multiplier, or more where a step
        releases the count of units within the clip norm, or their loss, too."""
        adaptive, loss = self.adaptive, self.noisy_loss
        found = adaptive.gradient_noise_multiplier if adaptive else self.noise_multiplier
        return (found**-2 - loss.stddev**-2) ** -0.5 if loss and found else found

    @property
    def noisy_loss(self) -> NoisyLoss | None:
        """How the training loss is released, or None if it is not."""
        if self.loss_bound is None or not self.noise_multiplier:
            return None
        return NoisyLoss(self.loss_bound, self.expected_count, self.noise_multiplier)

    @property
    def releases(self) -> list[AdaptiveClip | NoisyLoss]:
        """What each step releases beside its gradient, from the same draw."""
        return [each for each in (self.adaptive, self.noisy_loss) if each is not None]

    @property
    def before(self) -> list[tuple[PureEvent, int]]:
        """What is released before the first step, to the accountant."""
        return events_before(self.group_size_epsilon)

    @property
    def accounted_prob(self) -> float:
        """p or q as it is accounted: below sampling_prob with an assumed population."""
        return self.sampling_prob * assumed_share(self.assumed_population, self.num_users)

    @property
    def bands_given(self) -> int | None:
        """The bands as a setting: None where there can be none."""
        return self.bands if self.bands > 1 else None

    def event(self) -> StepEvent | None:
        """What a step is to the accountant, by the plan alone; None without noise."""
        if not self.noise_multiplier:
            return None
        if self.participations is not None:
            return allocated_event(self.noise_multiplier, self.num_steps // self.participations)
        cap = self.group_size if self.algorithm == Algorithm.ELS else 1
        event = cyclic_event(self.noise_multiplier, self.accounted_prob, cap, self.bands)
        changed = self.shared["max_changed"] if self.shared else 0
        return dataclasses.replace(event, max_changed=changed)

    @property
    def epsilon_holds(self) -> str:
        """What epsilon holds under: the adjacency, or a label that says that it is no guarantee."""
        return holds(self.as_dict())

    @property
    def compared(self) -> str:
        """The adjacency in words."""
        return ADJACENCY[SHARED if self.shared else self.adjacency]

    @property
    def label(self) -> str:
        """What makes epsilon no guarantee; empty where nothing does."""
        return label_of(self.as_dict())

    @property
    def guarantee(self) -> bool:
        """Whether epsilon is one."""
        return bool(self.noise_multiplier) and not self.label

    @property
    def slack(self) -> Slack:
        """What is to be added to epsilon and delta for noise that is not ideal, after all steps."""
        return self.slack_after(self.num_steps)

    def slack_after(
        self, num_steps: int, epsilon: float | None = None, delta: float | None = None
    ) -> Slack:
        """The slack of so many steps; see `noise.slack`.

        Args: epsilon, delta: what holds with ideal noise; None: what the plan aims at.
        """
        if not self.noise_multiplier:
            return Slack(0.0, 0.0)
        each = self.num_parameters + (self.clip_quantile is not None)
        each += self.loss_bound is not None
        strategy = self.strategy
        errors = strategy.cell_errors if strategy else CELL_ERRORS
        own = (self.target_epsilon, self.delta) if epsilon is None else (epsilon, delta or 0.0)
        return slack(max(1, num_steps) * each, *own, errors)

    @property
    def strategy(self) -> Strategy | None:
        """How steps take back noise of the steps before; None: they do not."""
        if self.noise != CORRELATED or self.bands == 1 or not self.noise_multiplier:
            return None
        stddev = self.gradient_noise_multiplier * 2.0 ** lattice_bits(self.num_parameters)
        return strategy(self.num_steps, self.bands, stddev)

    def add_noise(self) -> AddNoise:
        """What adds the noise of one step after another; a new one, with no steps behind it."""
        return Correlated(self.num_steps, self.bands) if self.strategy else add_gaussian

    @property
    def epsilon_metric(self) -> str:
        """The name of epsilon among the metrics."""
        if self.sampling_run != self.sampling_accounted:
            return "comparison_only/epsilon_as_if_poisson"
        if self.assumed_population is not None:
            return "comparison_only/epsilon_of_assumed_population"
        return "privacy/epsilon"

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON's types, without what only some plans have."""
        fields = {name: to_json(value) for name, value in dataclasses.asdict(self).items()}
        for name in LEFT_OUT_AT_DEFAULTS:
            if fields[name] == type(self).__dataclass_fields__[name].default:
                del fields[name]
        return {**fields, "non_private": list(self.non_private)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Plan":
        """The plan that `as_dict` wrote."""
        typed = {
            "algorithm": Algorithm(fields["algorithm"]),
            "target_epsilon": float(fields["target_epsilon"]),
            "predicted_error": _number(fields.get("predicted_error")),
            "non_private": tuple(fields["non_private"]),
        }
        if (found := fields.get("evaluations")) is not None:
            typed["evaluations"] = Evaluations(**found)
        return cls(**{**fields, **typed})


def assumed_share(assumed_population: int | None, num_users: int) -> float:
    """The part of the users accounted for that there are."""
    return num_users / (assumed_population or num_users)


def events_before(group_size_epsilon: float | None) -> list[tuple[PureEvent, int]]:
    """What choosing the group size privately releases, to the accountant."""
    return [] if group_size_epsilon is None else [(PureEvent(group_size_epsilon), 1)]


def _number(value: Any) -> float:
    """A number that `as_dict` wrote; nan, which is itself alone, where there is none."""
    number = math.nan if value is None else float(value)
    return math.nan if math.isnan(number) else number
