"""What a run can do in several ways: each way is a class, with what belongs to it alone.

A plan has one of each of `AnySampling`, `AnyNoise` and `AnyPurpose`. The aliases of fields are
their names in JSON, where they stand beside the fields of the plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, WithJsonSchema

from fedsim.accounting import StepEvent, allocated_event, cyclic_event
from fedsim.config import ADD_OR_REMOVE, COMPARISON_ONLY, ZERO_OUT
from fedsim.noise import slack

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


Number = Annotated[
    float,
    Field(strict=False),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "inf"}]}),
]
"""A number that may be infinite, which JSON has as the string 'inf'."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a step's units are drawn: what all ways have in common."""

    prob: Annotated[float, Field(alias="sampling_prob")]
    """p or q: the share of all units that is expected in a step."""
    assumed_population: int | None = None
    """How many users are accounted for; None: those there are."""
    bands: int = 1
    """b: groups of users that steps draw from in turn."""

    def accounted_prob(self, num_users: int) -> float:
        """p or q as it is accounted: below `prob` with an assumed population."""
        return self.prob * assumed_share(self.assumed_population, num_users)

    @property
    def bands_given(self) -> int | None:
        """The bands as a setting: None where there can be none."""
        return self.bands if self.bands > 1 else None

    def window(self, num_steps: int) -> int:
        """Successive steps of which a user takes part in exactly one; 1: there are no such."""
        return 1

    def event(
        self, noise_multiplier: float, *, num_steps: int, num_users: int, max_contributions: int
    ) -> StepEvent:
        """What a step is to the accountant."""
        prob = self.accounted_prob(num_users)
        return cyclic_event(noise_multiplier, prob, max_contributions, self.bands)

    @property
    def labels(self) -> list[str]:
        """What of the draws makes epsilon no guarantee."""
        if self.assumed_population is None:
            return []
        assumed = f"as if there were {self.assumed_population:,} users"
        return [f"{assumed}: an assumption, not a guarantee"]


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Sampling):
    """Every unit takes part by itself, with the same probability."""

    kind: Annotated[Literal["poisson"], Field(alias="sampling_run")] = "poisson"
    accounted: Annotated[Literal["poisson"], Field(alias="sampling_accounted")] = "poisson"
    bands: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class CyclicSampling(Sampling):
    """So, but of one of several groups of users, in turn."""

    kind: Annotated[Literal["cyclic"], Field(alias="sampling_run")] = "cyclic"
    accounted: Annotated[Literal["cyclic"], Field(alias="sampling_accounted")] = "cyclic"


@dataclass(frozen=True, kw_only=True)
class AllocatedSampling(Sampling):
    """Every user takes part equally often, at random steps."""

    participations: int
    """K: steps that each user takes part in."""
    kind: Annotated[Literal["allocation"], Field(alias="sampling_run")] = "allocation"
    accounted: Annotated[Literal["allocation"], Field(alias="sampling_accounted")] = "allocation"
    bands: Literal[1] = 1
    assumed_population: None = None

    def window(self, num_steps: int) -> int:
        """W = T / K."""
        return num_steps // self.participations

    def event(
        self, noise_multiplier: float, *, num_steps: int, num_users: int, max_contributions: int
    ) -> StepEvent:
        """What a step is to the accountant."""
        return allocated_event(noise_multiplier, self.window(num_steps))


@dataclass(frozen=True, kw_only=True)
class ShuffledSampling(Sampling):
    """Draws of a fixed size in shuffled order, accounted as if Poisson sampled."""

    kind: Annotated[Literal["shuffle"], Field(alias="sampling_run")] = "shuffle"
    accounted: Annotated[Literal["poisson"], Field(alias="sampling_accounted")] = "poisson"

    @property
    def labels(self) -> list[str]:
        """That no shuffling gives what is accounted, first."""
        return [COMPARISON_ONLY, *super().labels]


AnySampling = Annotated[
    PoissonSampling | CyclicSampling | AllocatedSampling | ShuffledSampling,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, kw_only=True)
class IndependentNoise:
    """The noise of a step is independent of that of all others."""

    predicted_error: float | None = None
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity; see `noise.toeplitz`. None: of a version that did not predict it."""
    kind: Annotated[Literal["independent"], Field(alias="noise")] = "independent"
    bands: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise:
    """Each step takes back part of the noise of the steps before."""

    predicted_error: float
    """As of independent noise."""
    kind: Annotated[Literal["correlated"], Field(alias="noise")] = "correlated"
    bands: int = 1
    """b: steps that noise reaches, which is the number of groups of users, too."""


AnyNoise = IndependentNoise | CorrelatedNoise


@dataclass(frozen=True)
class Trial:
    """One trial of a private selection, which is what is counted and released."""

    trial: Literal[True]


@dataclass(frozen=True)
class Audit:
    """A run to measure what it gives away, none to release."""

    planted: dict[str, int]
    """How many canaries of each kind coins were tossed for."""


@dataclass(frozen=True)
class Release:
    """A run whose model may be released."""


AnyPurpose = Annotated[Trial | Audit | Release, Field(union_mode="left_to_right")]
"""The first that fits; Release has nothing to fit."""


@dataclass(frozen=True)
class SharedTexts:
    """Texts with several owners, and what became of them; all public."""

    owner_sets: int
    with_several_owners: int
    """Texts."""
    kept: int
    """Texts that the bounds kept."""
    left_out: int
    """Texts that they did not."""
    max_changed: int
    """k: most groups of others in which texts of a user are; 0 with ELS."""
    seal: str
    """Keyed digest of what was kept."""


@dataclass(frozen=True)
class Evaluations:
    """What a run will release of its held-out users; all public."""

    epsilon: float
    """Of all evaluations together, for every held-out user."""
    delta: float
    noise_multiplier: float
    """Of each of them, for a user who moves the sum of losses by at most L / 2."""
    every: int
    """Steps between them; there is one before the first step, and one after the last."""
    count: int
    """How many, at most."""
    num_users: int
    """Users who are looked at: the same ones every time."""
    rows: int
    """Texts of each, at most."""
    loss_bound: float
    """L: losses above count as it, in nats per token."""
    seal: str = ""
    """Keyed digest of the held-out users' data: all evaluations are of the same users."""

    @property
    def stddev(self) -> float:
        """Of the noise on what is released, in nats per token."""
        return self.noise_multiplier * self.loss_bound / 2 / self.num_users

    def phases(self, count: int) -> list[tuple[StepEvent, int]]:
        """So many of them, to the accountant."""
        return [(StepEvent(self.noise_multiplier, 1.0), count)] if count else []

    @property
    def slack(self) -> tuple[float, float]:
        """What is to be added to epsilon and delta for noise that is not ideal."""
        part = slack(self.count, self.epsilon, self.delta)
        return part.epsilon, part.delta

    def groups(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Example indices of each user who is looked at and has texts.

        Args: offsets: of the store, int64 [users + 1].
        """
        users = np.linspace(0, len(offsets) - 2, self.num_users).astype(np.int64)
        found = []
        for low, high in zip(offsets[users], offsets[users + 1], strict=True):
            count = min(self.rows, int(high - low))
            found.append(np.linspace(low, high - 1, count).astype(np.int64))
        return [rows for rows in found if len(rows)]


def holds(labels: Iterable[str], adjacency: str, *, shared: bool) -> str:
    """What epsilon holds under: the adjacency, or labels that say that it is no guarantee."""
    return "; ".join(labels) or ADJACENCY[SHARED if shared else adjacency]


def assumed_share(assumed_population: int | None, num_users: int) -> float:
    """The part of the users accounted for that there are."""
    return num_users / (assumed_population or num_users)
