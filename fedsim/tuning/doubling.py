"""Group sizes for ULS: Algorithm 3 (Estimate-and-Double).

It splits a batch size into G_ULS and M (Appendix F of the paper). Pure: gradient norms and noise
are given as functions; `estimates` measures the norms, `uls_noise` computes the noise.

The sigma(M) of Algorithm 3 is taken as the noise of the mean gradient, sigma_ULS(M) / M. Read as
the noise multiplier itself it would grow with M, since q = M / N does: every turn would double G,
and the paper's "increasing M decreases sigma_ULS" would be false. With the division, L sigma is
v_ULS, the noise that the objective stands for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from fedsim import accounting
from fedsim.errors import expect, expect_count


@dataclasses.dataclass(frozen=True, order=True)
class Configuration:
    """Split of a batch size by DP-SGD-ULS."""

    group_size: int
    """G_ULS."""
    cohort_size: int
    """M."""

    @property
    def batch_size(self) -> int:
        """G_ULS M: expected gradients per step, at most."""
        return self.group_size * self.cohort_size


START = Configuration(1, 32)
"""The paper's first configuration."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest group and cohort sizes: those of the paper's sweep, or of the data."""

    group_size: float = math.inf
    cohort_size: float = math.inf

    def __contains__(self, at: Configuration) -> bool:
        return at.group_size <= self.group_size and at.cohort_size <= self.cohort_size


NO_LIMITS = Limits()


def estimate_and_double(
    batch_size: int,
    user_grad_norm: Callable[[int], float],
    noise: Callable[[int], float],
    start: Configuration = START,
    limits: Limits = NO_LIMITS,
) -> Configuration:
    """Algorithm 3: double G_ULS or M, whichever shrinks L_ULS(G) sigma(M) more, while G M < B.

    Args:
      user_grad_norm: L_ULS(G): norm of a user's mean gradient over at most G examples.
      noise: sigma(M), the mean gradient's noise that meets the privacy target with cohorts of M
        users; see the module's docstring, and `uls_noise`.
      limits: a doubling beyond them is not considered; where neither is left, the loop ends.
    Returns: the choice. G M >= batch_size, unless the limits were met.
    Raises: ConfigError: batch_size < 1, or the start is beyond the limits.
    Source: Charles et al. 2024, Algorithm 3.
    """
    expect_count("batch_size", batch_size, 1)
    at = start
    expect("start", at, at in limits, f"within {limits}")
    while at.batch_size < batch_size and any(next_ in limits for next_ in twice(at)):
        group, cohort = twice(at)
        tau_group = tau_cohort = math.inf
        if group in limits:
            tau_group = user_grad_norm(group.group_size) / user_grad_norm(at.group_size)
        if cohort in limits:
            tau_cohort = noise(cohort.cohort_size) / noise(at.cohort_size)
        at = group if tau_group < tau_cohort else cohort
    return at


def twice(at: Configuration) -> tuple[Configuration, Configuration]:
    """The configurations with twice the group size, and with twice the cohort size."""
    return (
        Configuration(2 * at.group_size, at.cohort_size),
        Configuration(at.group_size, 2 * at.cohort_size),
    )


def uls_noise(
    epsilon: float, delta: float, num_steps: int, num_users: int
) -> Callable[[int], float]:
    """Noise of the mean gradient at clip norm 1, by cohort size: sigma_ULS(M) / M (Theorem 2).

    Returns: a function that computes each value once.
    """
    target: Any = {"epsilon": epsilon, "delta": delta, "num_steps": num_steps}

    @functools.cache
    def noise(cohort_size: int) -> float:
        share = cohort_size / num_users
        return accounting.noise_multiplier(**target, sampling_prob=share) / cohort_size

    return noise
