"""The public constants of a run: fixed before its first step, never recomputed from a draw.

Each option of a run is one field of the plan, with constants of its own; an option that is off is
None. Pydantic reads, writes and describes plans in JSON.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, WithJsonSchema

from fedsim.accounting import (
    Event,
    PureEvent,
    Slack,
    StepEvent,
    allocated_event,
    cyclic_event,
    slack,
)
from fedsim.clipping import Clip, lattice_bits
from fedsim.config import (
    ADD_OR_REMOVE,
    ALLOCATION,
    CYCLIC,
    INDEPENDENT,
    ZERO_OUT,
    Algorithm,
    SamplingName,
    adapter_of,
    expect_format,
    to_json,
)
from fedsim.mechanism import AdaptiveClip, NoisyLoss
from fedsim.noise import CELL_ERRORS, Correlated, Strategy, add_gaussian, strategy
from fedsim.plan.facts import ASSUMPTIONS, NO_GUARANTEE, Caveat, Fact, Option, in_words, voiding

SHARED = "shared"
ADJACENCY = {
    ZERO_OUT: "zero out one user's texts, the number of users being public",
    ADD_OR_REMOVE: "add or remove one user",
    SHARED: "zero out all texts that one user owns, alone or with others, who owns which being "
    "public and fixed",
}
Number = Annotated[
    float,
    Field(strict=False),
    PlainSerializer(to_json, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "inf"}]}),
]
"""A number that may be infinite; JSON has infinity as the string 'inf'."""


@dataclass(frozen=True)
class SamplingPlan(Option):
    """How the units of a step are drawn."""

    kind: SamplingName
    """poisson: each unit takes part independently, with the same probability; cyclic: likewise, of
    one of several groups of users in turn; allocation: each user takes part in the same number of
    random steps."""
    prob: float
    """p or q: expected fraction of all units in a step."""
    bands: int = 1
    """b: number of groups of users that steps draw from in turn."""
    participations: int | None = None
    """K: number of steps that each user takes part in, with allocation."""

    def __post_init__(self):
        allocates = self.participations is not None
        if allocates != (self.kind == ALLOCATION) or (self.bands > 1 and self.kind != CYCLIC):
            raise ValueError("expected bands with cyclic alone, participations with allocation")


@dataclass(frozen=True)
class NoisePlan(Option):
    """Noise of a step: independent of that of other steps, or less part of that of those before."""

    kind: Literal["independent", "correlated"] = INDEPENDENT
    bands: int = 1
    """b: number of steps over which noise is correlated, and of groups of users."""

    def __post_init__(self):
        if self.bands > 1 and self.kind == INDEPENDENT:
            raise ValueError("expected bands with correlated noise alone")


@dataclass(frozen=True)
class SharedTexts(Option):
    """Texts with several owners, and their number in the training; all public."""

    kept: int
    """Number of texts within the bounds on contributions."""
    max_changed: int
    """k: largest number of other users' groups that contain texts of one user; 0 with ELS."""


@dataclass(frozen=True)
class Evaluations(Option):
    """Evaluations with noise on held-out users while a run trains; all constants are public.

    The mean loss per token of some texts of each user is cut off at L; the mean over users is
    released with Gaussian noise, `count` times at most. Together they cost one epsilon, for users
    whose texts the run does not train on.
    """

    epsilon: float
    """Cost of all evaluations together, for every held-out user."""
    delta: float
    noise_multiplier: float
    """sigma of each evaluation, for users who move the sum of losses by at most L / 2."""
    every: int
    """Steps between evaluations; one precedes the first step, one follows the last."""
    count: int
    """Largest number of evaluations."""
    num_users: int
    """Number of users in each evaluation, always the same ones."""
    rows: int
    """Largest number of texts of each user."""
    loss_bound: float
    """L: bound at which losses are cut off, in nats per token."""
    seal: str = ""
    """Keyed digest of the held-out users' data, which must not change during the run."""

    def phases(self, count: int) -> list[tuple[StepEvent, int]]:
        """Events of `count` evaluations for the accountant."""
        return [(StepEvent(self.noise_multiplier, 1.0), count)] if count else []

    @property
    def slack(self) -> Slack:
        """(epsilon, delta) to be added for noise that is not ideal."""
        return slack(self.count, self.epsilon, self.delta, CELL_ERRORS)


@dataclass(frozen=True)
class Plan(Option):
    """Constants of a run and of its privacy claim."""

    algorithm: Algorithm
    num_users: int
    num_units: int
    """Sampling units: the |D_sub| places or examples of the pool for ELS, the users for ULS."""
    num_steps: int
    batch_size: int
    """Expected gradients per step."""
    group_size: int
    expected_count: int
    """B (examples) for ELS, M (users) for ULS."""
    sampling: SamplingPlan
    clip_norm: float
    clipping: Literal["normalised", "plain"]
    target_epsilon: Number
    delta: float
    noise_multiplier: float
    num_parameters: int
    data_seal: str
    """Keyed digest of the data's fingerprint: with the key one can check that data are the same."""
    non_private: tuple[Caveat, ...]
    """Facts that the guarantee does not cover, beside those that this plan's own fields cause."""
    noise: NoisePlan = NoisePlan()
    purpose: Literal["release", "trial", "audit"] = "release"
    """release: the model may be released; trial: one of a private selection, which is counted and
    released in its place; audit: canaries measure the privacy loss, so it is not for release."""
    planted: dict[str, int] | None = None
    """Canaries of an audit by kind, before the coin that decides whether one is included."""
    group_size_epsilon: float | None = None
    """Cost of choosing the group size privately; part of target_epsilon."""
    clip_quantile: float | None = None
    """Quantile of gradient norms that clip_norm is moved towards; None: clip_norm is constant."""
    loss_bound: float | None = None
    """Bound at which the released training loss is cut off; None: it is not released."""
    adjacency: Literal["zero-out", "add-or-remove"] = ADD_OR_REMOVE
    seeded: bool = False
    """The key comes from a seed: such a run reproduces another one and has no guarantee."""
    shared: SharedTexts | None = None
    """None: each text has one owner."""
    evaluations: Evaluations | None = None
    """Evaluations of held-out users with noise while the run trains; None: there are none."""
    drawn_once: str = ""
    """Seal of pool, groups and turns, which are drawn once; see `planner.drawn_once`."""
    num_examples: int | None = None
    """Number of texts, where the guarantee takes it as public; None: it is published nowhere."""

    @property
    def clip(self) -> Clip:
        """The clip function of the first step, with its sensitivity."""
        normalised = self.clipping == "normalised"
        return Clip(self.clip_norm, normalised, in_float32=not self.noise_multiplier)

    @property
    def adaptive(self) -> AdaptiveClip | None:
        """The rule that adapts the clip norm; None if it is constant."""
        if self.clip_quantile is None:
            return None
        return AdaptiveClip(self.clip_quantile, self.expected_count, self.noise_multiplier)

    @property
    def gradient_noise_multiplier(self) -> float:
        """Noise multiplier of the gradient.

        noise_multiplier, or more where a step also releases the count of units within the clip
        norm, or their loss, from the same privacy budget.
        """
        adaptive, loss = self.adaptive, self.noisy_loss
        sigma = adaptive.gradient_noise_multiplier if adaptive else self.noise_multiplier
        return (sigma**-2 - loss.stddev**-2) ** -0.5 if loss and sigma else sigma

    @property
    def noisy_loss(self) -> NoisyLoss | None:
        """The release of the training loss; None if there is none."""
        if self.loss_bound is None or not self.noise_multiplier:
            return None
        return NoisyLoss(self.loss_bound, self.expected_count, self.noise_multiplier)

    @property
    def releases(self) -> list[AdaptiveClip | NoisyLoss]:
        """Releases of each step beside its gradient, from the same draw."""
        return [release for release in (self.adaptive, self.noisy_loss) if release is not None]

    @property
    def before(self) -> list[tuple[PureEvent, int]]:
        """Events that are released before the first step."""
        return events_before(self.group_size_epsilon)

    def event(self) -> StepEvent | None:
        """A step's event for the accountant, from the plan alone; None without noise."""
        if not self.noise_multiplier:
            return None
        sigma, how = self.noise_multiplier, self.sampling
        if how.participations is not None:
            event = allocated_event(sigma, self.num_steps // how.participations)
        else:
            drawn = self.group_size if self.algorithm == Algorithm.ELS else 1
            event = cyclic_event(sigma, how.prob, drawn, how.bands)
        changed = self.shared.max_changed if self.shared else 0
        return dataclasses.replace(event, max_changed=changed)

    @property
    def own_algorithm(self) -> str:
        """module:class of an algorithm of one's own, whose event the ledger alone has; or empty."""
        return next((each.of for each in self.non_private if each.fact == Fact.OWN_ALGORITHM), "")

    @property
    def epsilon_holds(self) -> str:
        """The adjacency in words, or the values of the facts that make epsilon no guarantee."""
        return self.reasons or self.compared

    @property
    def compared(self) -> str:
        """The adjacency in words."""
        return ADJACENCY[SHARED if self.shared else self.adjacency]

    @property
    def reasons(self) -> str:
        """Values of the facts that make a finite epsilon no guarantee; empty if it is one."""
        facts = voiding(0.0, seeded=self.seeded, trial=self.purpose == "trial")
        return "; ".join(each.fact for each in facts)

    @property
    def label(self) -> str:
        """The reasons in words, for readers; empty if there are none."""
        return f"{NO_GUARANTEE}{in_words(self.reasons)}" if self.reasons else ""

    @property
    def guarantee(self) -> bool:
        """True if epsilon is a guarantee."""
        return bool(self.noise_multiplier) and not self.reasons

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """Everything that the guarantee does not cover."""
        epsilon = 0.0 if self.noise_multiplier else math.inf
        own = voiding(epsilon, seeded=self.seeded, trial=self.purpose == "trial")
        return (*own, *(each for each in self.non_private if each.fact not in ASSUMPTIONS))

    @property
    def assumptions(self) -> tuple[Caveat, ...]:
        """The public model that the training starts from."""
        return tuple(each for each in self.non_private if each.fact in ASSUMPTIONS)

    @property
    def slack(self) -> Slack:
        """(epsilon, delta) to be added after all steps for noise that is not ideal."""
        return self.slack_after(self.num_steps)

    def slack_after(
        self, num_steps: int, epsilon: float | None = None, delta: float | None = None
    ) -> Slack:
        """The slack after `num_steps` steps; see `accounting.slack`.

        Args: epsilon, delta: guarantee with ideal noise; None: the plan's target.
        """
        if not self.noise_multiplier:
            return Slack(0.0, 0.0)
        numbers = self.num_parameters + (self.clip_quantile is not None)
        numbers += self.loss_bound is not None
        strategy = self.strategy
        errors = strategy.cell_errors if strategy else CELL_ERRORS
        if epsilon is None:
            epsilon, delta = self.target_epsilon, self.delta
        return slack(max(1, num_steps) * numbers, epsilon, delta or 0.0, errors)

    @property
    def strategy(self) -> Strategy | None:
        """Coefficients of correlated noise; None: noise is independent."""
        if self.noise.bands == 1 or not self.noise_multiplier:
            return None
        return strategy(self.num_steps, self.noise.bands, self.stddev)

    @property
    def stddev(self) -> float:
        """Standard deviation of a step's noise, in units of the sum."""
        return self.gradient_noise_multiplier * 2.0 ** lattice_bits(self.num_parameters)

    def add_noise(self, *, ahead: bool = False) -> Any:
        """A new function that adds the noise of one step after another, from the first. Args:
        ahead: it has `Correlated.begin`."""
        own = Correlated(self.num_steps, self.noise.bands)
        return own if ahead or self.strategy else add_gaussian

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        return adapter_of(Plan).dump_python(self, mode="json")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Plan":
        """Read a plan that `as_dict` wrote.

        Raises: ValueError: the fields are no plan; the message names one.
        """
        for name in (field.name for field in dataclasses.fields(cls)):
            if name not in fields:  # a default in its place could hide a fact
                raise ValueError(f"{name}: Field required")
        return expect_format(cls, fields)


def events_before(group_size_epsilon: float | None) -> list[tuple[PureEvent, int]]:
    """Events of choosing the group size privately."""
    return [] if group_size_epsilon is None else [(PureEvent(group_size_epsilon), 1)]


def ledger_head(plan: Plan, *, config_sha256: str, key_seal: str) -> dict[str, Any]:
    """The first line of a run's ledger: facts that are fixed for its life."""
    return {
        "plan": plan.as_dict(),
        "adjacency": plan.compared,
        "key_seal": key_seal,
        "config_sha256": config_sha256,
    }


def step_event(plan: Plan, released: list[tuple[Event, int]] | None) -> StepEvent | None:
    """A step's event: the plan's; of an algorithm of one's own, that of the last released step.

    Returns None without noise, or before such an algorithm has released a step.
    """
    if not plan.own_algorithm:
        return plan.event()
    steps = (event for event, _ in reversed(released or []) if isinstance(event, StepEvent))
    return next(steps, None)


def accounted_events(
    plan: Plan, released: list[tuple[Event, int]] | None
) -> list[tuple[Event, int]] | None:
    """Events that a privacy claim counts: all released steps, and those that were left.

    A run that ended before its last step may have been stopped because of its releases, and then
    its steps give away more than if their number had been fixed beforehand. Its end follows from
    all the steps it would have released, whose epsilon holds for every stopping rule
    (docs/theory/budget.md).
    Args: released: events of the ledger; None: without noise. If it is empty, nothing counts.
    """
    event = step_event(plan, released)
    if not released or event is None:
        return released
    done = sum(count for step, count in released if isinstance(step, StepEvent))
    left = max(0, plan.num_steps - done)
    last, count = released[-1]
    if last == event:  # one cycle may hold the last step that was released and the next one
        return [*released[:-1], (event, count + left)]
    return [*released, (event, left)]


def private_fields(plan: Plan) -> list[str]:
    """Fields of `summary.json` that are for the owner of the run alone: counts and losses."""
    counts = ["num_examples"] if plan.num_examples is None else []
    losses = [] if plan.evaluations else ["initial_eval_loss", "final_eval_loss"]
    return [*counts, "gradients_computed", "wall_seconds", *losses]


def claimed_fields(plan: Plan, epsilon: float, chain: str) -> dict[str, Any]:
    """Fields of `summary.json` about the guarantee; they follow from plan and ledger.

    Args:
      epsilon: that of `accounted_events`.
      chain: last hash of the ledger's chain.
    """
    of_plan = plan.as_dict()
    if plan.num_examples is None:  # the summary has the data's, for the owner of the run alone
        del of_plan["num_examples"]
    return {
        **of_plan,
        "sampling_prob": plan.sampling.prob,
        "sampling_run": plan.sampling.kind,
        "sampling_accounted": plan.sampling.kind,
        "outside": [fact.as_dict() for fact in plan.caveats],
        "private_fields": private_fields(plan),
        "epsilon": to_json(epsilon),
        "epsilon_holds": plan.epsilon_holds,
        "adjacency": plan.compared,
        "privacy_unit": "user",
        "gradient_noise_multiplier": plan.gradient_noise_multiplier,
        "slack": plan.slack._asdict(),
        "ledger_chain": chain,
    }
