"""Variance of the privacy noise per step of DP-SGD-ELS and DP-SGD-ULS: Section 3, Equation 7.

With Lipschitz losses and clip norms at the Lipschitz constants, both algorithms spend `batch_size`
gradients per step, and their noise per coordinate has variance (sigma_ELS L_ELS / B)^2 and
(sigma_ULS L_ULS / M)^2. The variance of the gradient itself is not part of it.
"""

import dataclasses
import math

from fedsim import accounting
from fedsim.tuning.estimates import noise_stddev


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is held fixed while group sizes and budgets vary; the defaults are the paper's."""

    num_users: int = 1024
    """N. >= 1."""
    num_steps: int = 1000
    """T. >= 1."""
    epsilon: float = 1.0
    """User-level epsilon. > 0."""
    delta: float = 1e-6
    """User-level delta. In (0, 1)."""
    example_grad_norm: float = 10.0
    """L_ELS: bound on the gradient norm of an example, and the clip norm of ELS. > 0."""


def els_noise_variance(setting: Setting, *, batch_size: int, group_size: int) -> float:
    """(sigma_ELS L_ELS / B)^2 with B = batch_size and p = B / (G_ELS N).

    Raises: ValueError: the batch size exceeds the pool of G_ELS N examples.
    """
    sigma = _noise_multiplier(setting, batch_size / (group_size * setting.num_users), group_size)
    return noise_stddev(setting.example_grad_norm, sigma, batch_size) ** 2


def uls_noise_variance(
    setting: Setting, *, batch_size: int, group_size: int, user_grad_norm: float
) -> float:
    """(sigma_ULS L_ULS / M)^2 with M = batch_size / G_ULS and q = M / N.

    Args:
      user_grad_norm: L_ULS, bound on the norm of the mean of a user's G_ULS gradients.
    Raises: ValueError: the cohort exceeds the number of users.
    """
    cohort = batch_size / group_size
    sigma = _noise_multiplier(setting, cohort / setting.num_users, 1)
    return noise_stddev(user_grad_norm, sigma, cohort) ** 2


def aligned_grad_norm(example_grad_norm: float, group_size: int) -> float:
    """L_ULS when a user's gradients all point one way: no diversity, the worst case for ULS."""
    return example_grad_norm


def orthogonal_grad_norm(example_grad_norm: float, group_size: int) -> float:
    """L_ULS = L_ELS / sqrt(G_ULS), when a user's gradients are orthogonal: the most diversity."""
    return example_grad_norm / math.sqrt(group_size)


def _noise_multiplier(setting: Setting, sampling_prob: float, max_contributions: int) -> float:
    return accounting.noise_multiplier(
        epsilon=setting.epsilon,
        delta=setting.delta,
        num_steps=setting.num_steps,
        sampling_prob=sampling_prob,
        max_contributions=max_contributions,
    )
