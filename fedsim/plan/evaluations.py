"""Evaluating on held-out users with noise, while a run trains: what it costs them is known before.

Of each user the mean loss per token of some texts counts, cut to [0, L]; the mean over users is
released with Gaussian noise, so many times as the plan says. What all of these cost together is one
epsilon, of users whose texts the run does not train on.
"""

import dataclasses
import math
from typing import Protocol

import numpy as np

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.config import PrivacyConfig, RunConfig
from fedsim.errors import expect
from fedsim.noise import slack

TWO_HELD_OUT = "data with two held-out users at least"
MOST_ROWS = 16
"""Texts of a user that are looked at, evenly spaced."""


class HeldOut(Protocol):
    """A store of held-out users, as far as the plan sees it."""

    num_users: int
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True)
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


def evaluations_of(
    privacy: PrivacyConfig, run: RunConfig, held_out: HeldOut | None
) -> Evaluations | None:
    """The evaluations that the settings ask for; None: they ask for none with noise.

    Raises: ConfigError: there are no users for them, or their loss has no bound.
    """
    if privacy.eval_epsilon is None:
        return None
    total = held_out.num_users if held_out is not None else 0
    expect("eval_epsilon", privacy.eval_epsilon, total > 1, TWO_HELD_OUT)
    assert held_out is not None
    one_owner = getattr(held_out, "owners", None) is None
    expect("eval_epsilon", privacy.eval_epsilon, one_owner, "texts with one owner each")
    bound = privacy.eval_loss_bound or math.log(getattr(held_out, "vocab_size", 1))
    expect("eval_loss_bound", privacy.eval_loss_bound, bound > 0, "a bound on the loss of the task")
    every = run.eval_every or max(1, privacy.num_steps // 10)
    count = 1 + -(-privacy.num_steps // every)
    users, delta = min(total, run.eval_examples), delta_of(total, privacy.delta)
    sigma, _ = noise_of(privacy.eval_epsilon, delta, count)
    rows = min(MOST_ROWS, max(1, run.eval_examples // users))
    return Evaluations(privacy.eval_epsilon, delta, sigma, every, count, users, rows, bound)


def delta_of(num_users: int, delta: float | None) -> float:
    """At which evaluations of so many held-out users cost what they may: N^-1.1, or that of the run
    where it is smaller."""
    return min(num_users**-1.1, delta or 1.0)


def noise_of(epsilon: float, delta: float, count: int = 1) -> tuple[float, tuple[float, float]]:
    """(sigma, slack) of evaluations that cost epsilon together, with noise that is not ideal."""
    part = slack(count, epsilon, delta)
    sigma = accounting.noise_multiplier(
        epsilon=epsilon - part.epsilon,
        delta=delta - part.delta,
        num_steps=count,
        sampling_prob=1.0,
    )
    return sigma, (part.epsilon, part.delta)
