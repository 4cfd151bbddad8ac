"""Can a private training learn? Its noise compared with the most that its steps can add up to.

Parameters are sums of gradients. If all steps agree, the sum of T mean gradients, each of norm C at
most, is T C long; the noise on it has the same size in each of d directions. Where the noise is
much longer than that, little is learnt of what users have in common. This is no bound: it is a rule
of thumb on public numbers, for people who choose settings.
"""

import math

from fedsim.config import Algorithm, default_delta
from fedsim.errors import expect
from fedsim.plan.plan import Plan

LEARNS, HARDLY = 0.5, 4.0
"""Ratios of noise to signal from which on a training learns in part, or almost nothing."""
MIN_USERS, FEW_USERS = 10, 1000
"""A private run with fewer users is refused, or warned about."""


def noise_ratio(noise_on_sums: float, num_parameters: int, num_steps: int) -> float:
    """Length of the noise on the sum of all steps, relative to the longest sum of gradients.

    Args:
      noise_on_sums: of a coordinate, in units of the clip norm.
      num_parameters: number of coordinates with noise.
    """
    return noise_on_sums * math.sqrt(num_parameters) / num_steps


def outlook(ratio: float, num_users: int) -> str:
    """Sentences on how much a training can learn. Args: ratio: from `noise_ratio`."""
    times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"
    noise = f"The noise norm is {times} times the largest possible sum of updates"
    many = f"{num_users:,} users"
    if ratio < LEARNS:
        return f"{many} are enough for this model to learn. {noise}"
    noise += "; more users or steps, a larger --batch-size or a small --lora-rank help"
    if ratio < HARDLY:
        return f"The model will learn only in part from {many}. {noise}"
    return f"With {many} the noise dominates; the model will not learn. {noise}"


def doubt(ratio: float, num_users: int) -> list[str]:
    """A warning that a training may learn little; empty if there is no reason. Args: as above."""
    sentence = outlook(ratio, num_users)
    if num_users < FEW_USERS:
        return [f"With so few users, hiding one user hides most of the signal. {sentence}"]
    return [sentence] if ratio >= LEARNS else []


def expect_enough_users(num_users: int, epsilon: float) -> None:
    """Raise ConfigError for a private training with so few users that it can teach nothing."""
    least = f"at least {MIN_USERS}: user-level privacy hides each user among the others, and "
    least += "needs hundreds, better thousands; epsilon=inf trains without privacy"
    enough = num_users >= MIN_USERS or math.isinf(epsilon)
    expect("data", f"{num_users} training users", enough, least)


def warnings_of(plan: Plan) -> list[str]:
    """Warnings about plans that are valid but probably not intended."""
    warnings = []
    users, noise = plan.num_users, plan.gradient_noise_multiplier
    if noise and plan.delta > 1 / users:
        warnings.append(
            f"delta={plan.delta:g} is above 1/{users}: it allows publishing all texts of one of "
            f"{users:,} users; the default is {default_delta(users):.2g}"
        )
    if noise > plan.expected_count:
        unit = "examples" if plan.algorithm == Algorithm.ELS else "users"
        warnings.append(
            "in every direction, the noise of a step is "
            f"{noise / plan.expected_count:.1f} times as large as the gradient of "
            f"{plan.expected_count} {unit} can be: the model will hardly learn without a larger "
            "--batch-size or --epsilon"
        )
    elif noise and (error := plan.noise.predicted_error) is not None:
        on_sums = error / plan.expected_count
        warnings += doubt(noise_ratio(on_sums, plan.num_parameters, plan.num_steps), users)
    return warnings
