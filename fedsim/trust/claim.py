"""The claim of a run: computed from its ledger, rounded up, and put into words.

`facts` has the values that templates of documents share.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event, StepEvent, at_most
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm
from fedsim.errors import ConfigError, FedsimError
from fedsim.plan import Fact, Plan, accounted_events
from fedsim.run import StoredRun, ledger
from fedsim.trust.evidence import Check

CURVE_POINTS = 25
SLACK_SHARE = 1e-3  # of delta, for the slack of several users together
FALSE_ALARMS = (0.001, 0.01, 0.05)
PEOPLE = (2, 5, 10, 100)

OWNERS = "owners"
"""Kind of neighbours: data whose texts may have several owners."""
ONE_OWNER = {
    "unit": "a user: all texts with the same id in the data, one person's or not",
    "held_out": "users not trained on",
    "texts": "all of their texts",
}
WORDS = {
    OWNERS: {
        "unit": "a user: what is in all texts that an id in the data owns, alone or with others",
        "adjacency": "data sets that differ in what is in the texts that one user owns; users, "
        "texts and who owns which are the same, and public",
        "held_out": "texts of held-out users",
        "els": "{kept} texts of {num_users} users ({own}; a text can have several owners)",
        "uls": "{kept} texts of {num_users} users ({own}; a text can have several owners)",
        "known": "taking as known who the users are and who owns which text",
        "texts": "what is in all texts that they own, alone or with others,",
    },
    ZERO_OUT: {
        **ONE_OWNER,
        "adjacency": "data sets that differ by all texts of one user; the users are the same, and "
        "public",
        "els": "at most {group_size} texts of each of {num_users} users ({own})",
        "uls": "texts of {num_users} users ({own})",
        "known": "taking as known that they are among the users, and how many users there are",
    },
    ADD_OR_REMOVE: {
        **ONE_OWNER,
        "adjacency": "data sets that differ by one user with all texts, added or removed",
        "els": "{num_units} of the {num_examples} texts of {num_users} users ({own})",
        "uls": "{num_examples} texts of {num_users} users ({own})",
        "known": "taking as known how many users and texts there are",
    },
}
"""Phrases of each kind of neighbouring data sets."""
OWN = "each an id of its own in the data"
PRIVATE, OPEN, LABELLED = "private", "open", "labelled"
CLAIMS = {
    PRIVATE: "The model was trained on {trained} with user-level differential privacy of epsilon = "
    "{epsilon} and delta = {delta}. For every one of these users, {known}, whatever their texts "
    "say and whatever else is known, including {texts} in the training multiplies the probability "
    "of any outcome by at most {factor} and adds at most {delta}, in either direction. {digest}",
    OPEN: "The model was trained on {trained} without noise, so that no privacy is claimed for "
    "anyone. {digest}",
    LABELLED: "The model was trained on {trained}; no privacy is claimed: epsilon = {epsilon} is "
    "{label}. {digest}",
}
"""Sentences of the claim, by what the run is."""


class ReportError(FedsimError):
    """A run has no claim that could be reported.

    Attributes: public: the reason, without what was found, which may say what only the owner may
      see; empty: the message is that.
    """

    public = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claimed:
    """What a ledger claims of a model."""

    plan: Plan
    lines: list[dict[str, Any]]
    phases: list[tuple[Event, int]] | None
    """Events of the claim: all planned steps, also those that were not done; None without noise."""
    epsilon: float
    """Epsilon at the plan's delta, both with the slack of noise that is not ideal."""
    fingerprint: str
    """sha256 of the model's parameters."""

    @classmethod
    def of(cls, plan: Plan, lines: list[dict[str, Any]], fingerprint: str, **fields: Any) -> Self:
        """The claim of a ledger's lines.

        Args: fields: those of a subclass.
        """
        phases = accounted_events(plan, ledger.phases(lines))
        common = {"plan": plan, "lines": lines, "phases": phases, "fingerprint": fingerprint}
        unpriced = cls(**common, epsilon=math.inf, **fields)
        slack = plan.slack_after(unpriced.num_steps)
        epsilon = ledger.epsilon_of(phases, plan.delta - slack.delta) + slack.epsilon
        return dataclasses.replace(unpriced, epsilon=epsilon)

    @property
    def num_released(self) -> int:
        """Number of released steps."""
        return len(ledger.steps_of(self.lines))

    @property
    def num_steps(self) -> int:
        """Number of steps that count: all planned steps, once anything was released."""
        if self.phases is None:
            return self.num_released
        return sum(count for event, count in self.phases if isinstance(event, StepEvent))

    @property
    def kind(self) -> str:
        """Key of CLAIMS."""
        return OPEN if self.phases is None else LABELLED if self.plan.label else PRIVATE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released(Claimed):
    """The releases of a run, from its ledger, and what was checked of it."""

    run_dir: Path
    stored: StoredRun
    checks: list[Check]


def claim(released: Claimed) -> str:
    """The claim in two sentences that can be quoted, and the digest of the model."""
    plan, words = released.plan, words_of(released.plan)
    names = ("num_users", "num_examples", "num_units", "group_size")
    counts = {name: f"{getattr(plan, name) or 0:,}" for name in names}
    counts["kept"] = "" if plan.shared is None else f"{plan.shared.kept:,}"
    trained = words[plan.algorithm].format(**counts, own=OWN)
    factor = math.exp(min(released.epsilon, 700))
    return CLAIMS[released.kind].format(
        trained=trained,
        digest=f"SHA-256 of the model: {released.fingerprint}.",
        known=words["known"],
        texts=words["texts"],
        epsilon=at_most(released.epsilon, ".4f"),
        delta=at_most(plan.delta, ".2e"),
        factor=at_most(factor, ",.2f" if factor < 1e6 else ".2e"),
        label=plan.label,
    )


def words_of(plan: Plan) -> dict[str, str]:
    """Phrases of the plan's kind of neighbouring data sets; see WORDS."""
    return WORDS[OWNERS if plan.shared is not None else plan.adjacency]


def attack_bounds(released: Claimed) -> list[tuple[float, float]]:
    """Bounds on any attack: (false positive rate, largest true positive rate); empty without a
    claim."""
    if released.kind != PRIVATE or not released.num_steps:
        return []
    return [(alarms, max_true_positives(released, alarms)) for alarms in FALSE_ALARMS]


def max_true_positives(released: Claimed, false_alarms: float) -> float:
    """Largest true positive rate of any test at a false positive rate, by the whole curve.

    Every (epsilon, delta) of the curve bounds it: by e^epsilon f + delta, and from the other side
    by 1 - e^-epsilon (1 - delta - f). Source: Kairouz et al. 2015, Theorem 2.1.
    """
    epsilons, deltas = curve(released)
    above = np.exp(epsilons) * false_alarms + deltas
    below = 1 - np.exp(-epsilons) * np.maximum(0, 1 - deltas - false_alarms)
    return float(min(1.0, above.min(), below.min()))


def several(released: Claimed) -> list[tuple[int, float]]:
    """(k, epsilon of k users together) at the claim's delta, for each of PEOPLE; empty without a
    claim, or of an algorithm of one's own. Source: docs/theory/people.md."""
    if released.kind != PRIVATE or not released.num_steps or released.plan.own_algorithm:
        return []
    return [(people, epsilon_for(released, people)) for people in PEOPLE]


def epsilon_for(released: Claimed, people: int) -> float:
    """Epsilon of so many users together, at the claim's delta; inf if none is known.

    Args: released: a claim, of a run with noise.
    """
    plan, phases = released.plan, released.phases
    assert phases is not None
    by_group = plan.sampling.participations is not None or plan.noise.bands > 1
    left = plan.delta * (1 - SLACK_SHARE)
    try:
        if by_group:
            ideal = accounting.group_epsilon(phases, left, people)
        else:
            ideal = accounting.epsilon(accounting.for_people(phases, people), left)
    except ConfigError:  # the loss is too large to be added up
        return math.inf
    part = plan.slack_after(released.num_steps, ideal, plan.delta)
    return ideal + part.epsilon if left + part.delta <= plan.delta else math.inf


def curve(released: Claimed) -> tuple[np.ndarray, np.ndarray]:
    """The trade-off curve of all releases: epsilons and deltas, each pair with its slack."""
    assert released.phases is not None
    epsilons = np.linspace(0, 1.3 * released.epsilon, CURVE_POINTS)
    deltas = accounting.privacy_curve(released.phases, epsilons)
    pairs = zip(epsilons.tolist(), deltas.tolist(), strict=True)
    slacks = np.array([released.plan.slack_after(released.num_steps, *pair) for pair in pairs])
    return epsilons + slacks[:, 0], np.minimum(1, deltas + slacks[:, 1])


def facts(released: Released) -> dict[str, Any]:
    """Values for the templates of report and model card."""
    plan, words = released.plan, words_of(released.plan)
    part = plan.slack_after(released.num_steps)
    slack, missed = at_most(part.epsilon, ".1e"), at_most(part.delta, ".1e")
    return {
        "run": released,
        "plan": plan,
        "claim": claim(released),
        "private": released.phases is not None,
        "label": plan.label,
        "els": plan.algorithm == Algorithm.ELS,
        "prob": plan.sampling.prob * plan.sampling.bands,
        "unit": words["unit"],
        "adjacency": words["adjacency"],
        "slack": f"{slack} of epsilon, {missed} of delta",
        "tuning": [str(each) for each in plan.caveats if each.fact == Fact.TUNED_ON_DATA],
    }
