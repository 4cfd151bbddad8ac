"""The public constants of a run: fixed before its first step, never recomputed from a draw.

What a run can do in several ways is one field of the plan, of one of the classes of `options`; an
option that is off is None. In JSON a plan is flat: the fields of `sampling`, `noise` and `purpose`
stand beside its own, by the names that they have in ledger, summary and settings.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from fedsim.accounting import Event, PureEvent, Slack, StepEvent
from fedsim.clipping import AdaptiveClip, Clip, NoisyLoss, lattice_bits
from fedsim.config import ADD_OR_REMOVE, INDEPENDENT, Algorithm, to_json
from fedsim.errors import first_fault
from fedsim.noise import CELL_ERRORS, AddNoise, Correlated, Strategy, add_gaussian, slack, strategy
from fedsim.plan.options import (
    REPRODUCTION,
    TRIAL,
    UNPROVEN,
    AnyNoise,
    AnyPurpose,
    AnySampling,
    Evaluations,
    IndependentNoise,
    Number,
    Release,
    SharedTexts,
    Trial,
    holds,
)

FLAT = ("sampling", "noise", "purpose")
"""Fields of a plan whose own fields stand beside the plan's in JSON."""
LEFT_OUT_AT = {
    **{"shared": None, "bands": 1, "noise": INDEPENDENT, "loss_bound": None},
    **{"evaluations": None, "drawn_once": "", "unproven": None, "predicted_error": None},
}
"""What is left out in JSON, as it was written before there were these."""


@dataclass(frozen=True)
class Plan:
    """What a run will do, and what it will be able to claim."""

    __pydantic_config__: ClassVar[Any] = {"strict": True, "use_attribute_docstrings": True}

    algorithm: Algorithm
    num_users: int
    num_examples: int
    num_units: int
    """Sampling units: the |D_sub| examples of the pool for ELS, the users for ULS."""
    num_steps: int
    budget: int
    """Expected gradients of a step."""
    group_size: int
    expected_count: int
    """B (examples) for ELS, M (users) for ULS."""
    sampling: AnySampling
    clip_norm: float
    clipping: Literal["normalised", "plain"]
    target_epsilon: Number
    delta: float
    noise_multiplier: float
    num_parameters: int
    data_seal: str
    """Keyed digest of the data's fingerprint: says to the key's owner whether data are the same."""
    non_private: tuple[str, ...]
    """What the guarantee does not cover: read off the data, or known to others."""
    noise: AnyNoise = IndependentNoise()
    purpose: AnyPurpose = Release()
    group_size_epsilon: float | None = None
    """What choosing the group size privately cost; part of target_epsilon."""
    clip_quantile: float | None = None
    """What clip_norm, the first step's, is moved towards; None: it stays."""
    loss_bound: float | None = None
    """Up to which the training loss of each step is released, with noise; None: it is not."""
    adjacency: Literal["zero-out", "add-or-remove"] = ADD_OR_REMOVE
    seeded: bool = False
    """Whether the key came from a seed: such a run reproduces another one, and claims nothing."""
    shared: SharedTexts | None = None
    """None: each text has one owner."""
    evaluations: Evaluations | None = None
    """What is released of held-out users while the run trains; None: nothing with noise."""
    drawn_once: str = ""
    """A seal of what was drawn once for several steps; see `plan.drawn_once`."""
    unproven: str | None = None
    """The strategy, where an earlier version had it and this one has not, because contributions are
    not proven to be at most C."""

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
        """p or q as it is accounted: below that of the draws with an assumed population."""
        return self.sampling.accounted_prob(self.num_users)

    def event(self) -> StepEvent | None:
        """What a step is to the accountant, by the plan alone; None without noise."""
        if not self.noise_multiplier:
            return None
        event = self.sampling.event(
            self.noise_multiplier,
            num_steps=self.num_steps,
            num_users=self.num_users,
            max_contributions=self.group_size if self.algorithm == Algorithm.ELS else 1,
        )
        changed = self.shared.max_changed if self.shared else 0
        return dataclasses.replace(event, max_changed=changed)

    @property
    def epsilon_holds(self) -> str:
        """What epsilon holds under: the adjacency, or a label that says that it is no guarantee."""
        return self.label or self.compared

    @property
    def compared(self) -> str:
        """The adjacency in words."""
        return holds([], self.adjacency, shared=self.shared is not None)

    @property
    def label(self) -> str:
        """What makes epsilon no guarantee; empty where nothing does."""
        labels = [
            *self.sampling.labels,
            *([UNPROVEN] if self.unproven else []),
            *([TRIAL] if isinstance(self.purpose, Trial) else []),
            *([REPRODUCTION] if self.seeded else []),
        ]
        return "; ".join(labels)

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
        if self.noise.bands == 1 or not self.noise_multiplier:
            return None
        stddev = self.gradient_noise_multiplier * 2.0 ** lattice_bits(self.num_parameters)
        return strategy(self.num_steps, self.noise.bands, stddev)

    def add_noise(self) -> AddNoise:
        """What adds the noise of one step after another; a new one, with no steps behind it."""
        return Correlated(self.num_steps, self.noise.bands) if self.strategy else add_gaussian

    @property
    def epsilon_metric(self) -> str:
        """The name of epsilon among the metrics."""
        if self.sampling.kind != self.sampling.accounted:
            return "comparison_only/epsilon_as_if_poisson"
        if self.sampling.assumed_population is not None:
            return "comparison_only/epsilon_of_assumed_population"
        return "privacy/epsilon"

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON's types, flat, without what only some plans have."""
        fields = plans().dump_python(self, mode="json", by_alias=True)
        for name in FLAT:
            fields |= fields.pop(name)
        return {
            name: to_json(value)
            for name, value in fields.items()
            if name not in LEFT_OUT_AT or value != LEFT_OUT_AT[name]
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Plan":
        """The plan that `as_dict`, of this version or an earlier one, wrote.

        Raises: ValueError: it is none; the line names a field.
        """
        nested = {**fields, **dict.fromkeys(FLAT, {"noise": INDEPENDENT, **fields})}
        try:
            plan = plans().validate_json(json.dumps(nested))
        except ValidationError as error:
            raise ValueError(first_fault(error)) from None
        written = plan.as_dict()
        for name, value in fields.items():
            if written.get(name, LEFT_OUT_AT.get(name)) != value:
                raise ValueError(f"{name}: not of such a plan")
        return plan


@functools.cache
def plans() -> TypeAdapter[Plan]:
    """What reads and writes plans, with the fields of `FLAT` each by itself."""
    return TypeAdapter(Plan)


def events_before(group_size_epsilon: float | None) -> list[tuple[PureEvent, int]]:
    """What choosing the group size privately releases, to the accountant."""
    return [] if group_size_epsilon is None else [(PureEvent(group_size_epsilon), 1)]


def ledger_head(plan: Plan, *, config_sha256: str, key_seal: str) -> dict[str, Any]:
    """The first line of a run's ledger: what is fixed for its life."""
    before = [{"what": "group_size", **dataclasses.asdict(event)} for event, _ in plan.before]
    return {
        "plan": plan.as_dict(),
        "adjacency": plan.compared,
        "slack": plan.slack._asdict(),
        "key_seal": key_seal,
        "config_sha256": config_sha256,
        **({"before": before} if before else {}),
    }


def claimed_phases(
    plan: Plan, released: list[tuple[Event, int]] | None
) -> list[tuple[Event, int]] | None:
    """What a claim counts, to the accountant: all that was released, and the steps that were left.

    A run that ended before its last step may have been stopped because of what it had released, and
    then the steps until there give away more than if their number had been fixed beforehand. How it
    ended follows from all the steps it would have released: their epsilon holds for every rule of
    stopping (docs/budget.md).
    Args: released: of a ledger; None: without noise. Where nothing was released, nothing counts.
    """
    event = plan.event()
    if not released or event is None:
        return released
    done = sum(n for each, n in released if isinstance(each, StepEvent))
    left = max(0, plan.num_steps - done)
    last, count = released[-1]
    if last == event:  # one cycle may hold the last step that was released and the next one
        return [*released[:-1], (event, count + left)]
    return [*released, (event, left)]


def claimed_fields(plan: Plan, epsilon: float, chain: str) -> dict[str, Any]:
    """What `summary.json` says of the guarantee: it follows from the plan and the ledger.

    Args: epsilon: of `claimed_phases`. chain: the ledger's last link.
    """
    realised = "gradients_computed and wall_seconds (sizes of the draws)"
    return {
        **plan.as_dict(),
        "non_private": [*plan.non_private, realised],
        "epsilon": to_json(epsilon),
        "epsilon_holds": plan.epsilon_holds,
        "adjacency": plan.compared,
        "privacy_unit": "user",
        "gradient_noise_multiplier": plan.gradient_noise_multiplier,
        "slack": plan.slack._asdict(),
        "ledger_chain": chain,
    }
