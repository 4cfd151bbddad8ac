"""Options of a run: each option is a class with its own constants.

A plan has one of each of `AnySampling`, `AnyNoise` and `AnyPurpose`, told apart by `kind`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PlainSerializer, WithJsonSchema

from fedsim.accounting import StepEvent, allocated_event, cyclic_event
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, to_json
from fedsim.noise import slack

SHARED = "shared"
ADJACENCY = {
    ZERO_OUT: "zero out one user's texts, the number of users being public",
    ADD_OR_REMOVE: "add or remove one user",
    SHARED: "zero out all texts that one user owns, alone or with others, who owns which being "
    "public and fixed",
}
PROTECTS = {
    ADJACENCY[ZERO_OUT]: "all texts of a user; that they are one of the users is not hidden",
    ADJACENCY[ADD_OR_REMOVE]: "all texts of a user, and whether they are one of the users",
    ADJACENCY[SHARED]: "all texts that a user owns, alone or with others; who owns which is not "
    "hidden",
}
"""The same for people, by the adjacency in words."""

Number = Annotated[
    float,
    Field(strict=False),
    PlainSerializer(to_json, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "inf"}]}),
]
"""A number that may be infinite; JSON has infinity as the string 'inf'."""


class Option:
    """Base class of options: how pydantic reads and describes them."""

    __pydantic_config__: ClassVar[Any] = {
        "strict": True,
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "json_schema_serialization_defaults_required": True,
    }


@dataclass(frozen=True, kw_only=True)
class Sampling(Option):
    """A way to draw the units of a step: fields and methods that all of them share."""

    prob: float
    """p or q: expected fraction of all units in a step."""
    bands: int = 1
    """b: number of groups of users that steps draw from in turn."""

    @property
    def bands_given(self) -> int | None:
        """The bands as a setting: None if there is one group."""
        return self.bands if self.bands > 1 else None

    def window(self, num_steps: int) -> int:
        """Number of successive steps of which a user takes part in exactly one; 1: no such rule."""
        return 1

    def event(
        self, noise_multiplier: float, *, num_steps: int, max_contributions: int
    ) -> StepEvent:
        """A step's event for the accountant."""
        return cyclic_event(noise_multiplier, self.prob, max_contributions, self.bands)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Sampling):
    """Each unit takes part independently, with the same probability."""

    kind: Literal["poisson"] = "poisson"
    accounted: Literal["poisson"] = "poisson"
    bands: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class CyclicSampling(Sampling):
    """Poisson sampling from one of several groups of users, in turn."""

    kind: Literal["cyclic"] = "cyclic"
    accounted: Literal["cyclic"] = "cyclic"


@dataclass(frozen=True, kw_only=True)
class AllocatedSampling(Sampling):
    """Random allocation: each user takes part in the same number of random steps."""

    participations: int
    """K: number of steps that each user takes part in."""
    kind: Literal["allocation"] = "allocation"
    accounted: Literal["allocation"] = "allocation"
    bands: Literal[1] = 1

    def window(self, num_steps: int) -> int:
        """W = T / K."""
        return num_steps // self.participations

    def event(
        self, noise_multiplier: float, *, num_steps: int, max_contributions: int
    ) -> StepEvent:
        """A step's event for the accountant."""
        return allocated_event(noise_multiplier, self.window(num_steps))


AnySampling = Annotated[
    PoissonSampling | CyclicSampling | AllocatedSampling,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, kw_only=True)
class IndependentNoise(Option):
    """Noise that is independent of that of all other steps."""

    predicted_error: float | None = None
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity (`noise.correlated`)."""
    kind: Literal["independent"] = "independent"
    bands: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(Option):
    """Noise of which each step subtracts part of that of the steps before."""

    predicted_error: float
    """As for independent noise."""
    kind: Literal["correlated"] = "correlated"
    bands: int = 1
    """b: number of steps over which noise is correlated, and of groups of users."""


AnyNoise = Annotated[IndependentNoise | CorrelatedNoise, Field(discriminator="kind")]


@dataclass(frozen=True)
class Trial(Option):
    """The run is a trial of a private selection, which is counted and released in its place."""

    kind: Literal["trial"] = "trial"


@dataclass(frozen=True)
class Audit(Option):
    """The run has planted canaries, to measure its privacy loss; it is not for release."""

    planted: dict[str, int]
    """Number of canaries of each kind, before the coin that decides whether one is included."""
    kind: Literal["audit"] = "audit"


@dataclass(frozen=True)
class Release(Option):
    """The model of the run may be released."""

    kind: Literal["release"] = "release"


AnyPurpose = Annotated[Trial | Audit | Release, Field(discriminator="kind")]


@dataclass(frozen=True)
class SharedTexts(Option):
    """Texts with several owners, and their number in the training; all public."""

    owner_sets: int
    """Number of distinct sets of owners."""
    with_several_owners: int
    """Number of texts with several owners."""
    kept: int
    """Number of texts within the bounds on contributions."""
    left_out: int
    """Number of texts beyond these bounds."""
    max_changed: int
    """k: largest number of other users' groups that contain texts of one user; 0 with ELS."""
    seal: str
    """Keyed digest of the kept texts."""


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

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on the released mean, in nats per token."""
        return self.noise_multiplier * self.loss_bound / 2 / self.num_users

    def phases(self, count: int) -> list[tuple[StepEvent, int]]:
        """Events of `count` evaluations for the accountant."""
        return [(StepEvent(self.noise_multiplier, 1.0), count)] if count else []

    @property
    def slack(self) -> tuple[float, float]:
        """(epsilon, delta) to be added for noise that is not ideal."""
        part = slack(self.count, self.epsilon, self.delta)
        return part.epsilon, part.delta

    def groups(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Example indices of each evaluated user who has texts; see `rows_of_users`."""
        return rows_of_users(offsets, self.num_users, self.rows)


def rows_of_users(offsets: np.ndarray, num_users: int, most: int) -> list[np.ndarray]:
    """Example indices of users who have texts; users are evenly spaced, and so are a user's texts.

    Args:
      offsets: the store's, int64 [users + 1].
      num_users: number of users, of whom those without texts are left out.
      most: largest number of texts of each user.
    """
    users = np.linspace(0, len(offsets) - 2, num_users).astype(np.int64)
    groups = []
    for low, high in zip(offsets[users], offsets[users + 1], strict=True):
        count = min(most, int(high - low))
        groups.append(np.linspace(low, high - 1, count).astype(np.int64))
    return [rows for rows in groups if len(rows)]


def adjacency_in_words(adjacency: str, *, shared: bool) -> str:
    """The adjacency in words."""
    return ADJACENCY[SHARED if shared else adjacency]
