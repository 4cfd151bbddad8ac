"""The baseline of Figure 1: user-level epsilon from an example-level one, by group privacy alone.

What accounting.epsilon is compared with; nothing in training uses it.
"""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from scipy import optimize

from fedsim.accounting import StepEvent, accountant, composition, log_group_growth
from fedsim.errors import expect, expect_count


def black_box_epsilon(event: StepEvent, num_steps: int, delta: float) -> float:
    """The user-level epsilon that group privacy alone gives from an example-level guarantee.

    (epsilon_0, delta_0) for one contribution gives G epsilon_0 and
    delta_0 (e^(G epsilon_0) - 1) / (e^epsilon_0 - 1) for G; the smallest epsilon_0 that meets
    delta is used. delta_0 may have to be astronomically small: below what the composed loss
    resolves it comes from Renyi divergences.
    Returns: inf where no epsilon_0 meets delta.
    Source: Vadhan 2017, Lemma 2.2; the baseline of Figure 1.
    """
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    expect_count("num_steps", num_steps, 1)
    group = event.max_contributions
    example = dataclasses.replace(event, max_contributions=1)
    if group == 1:
        return accountant.epsilon([(example, num_steps)], delta)
    example_log_delta = _example_log_delta(example, num_steps, delta)

    def excess(levels: np.ndarray) -> np.ndarray:
        """log of delta's group version over delta."""
        return example_log_delta(levels) + log_group_growth(levels, group) - math.log(delta)

    levels = np.geomspace(1e-6, 1e9, 1000)
    enough = np.flatnonzero(excess(levels) <= 0)
    if enough.size == 0:
        return math.inf
    if enough[0] == 0:  # the least that is looked at will do
        return group * levels[0]
    bracket = (levels[enough[0] - 1], levels[enough[0]])
    root = optimize.root_scalar(
        lambda level: excess(np.array([level]))[0], bracket=bracket, rtol=1e-9
    )
    return group * root.root * (1 + 1e-6)


def _example_log_delta(
    event: StepEvent, num_steps: int, delta: float
) -> Callable[[np.ndarray], np.ndarray]:
    """log delta as a function of epsilon, from the composed loss or, far out, from Renyi orders."""
    composed = accountant.composed_loss([(event, num_steps)], delta)
    floor = 10 * composition.COMPOSED_TAIL_MASS
    resolved = max(
        composition.pmf_epsilon_at(pmf, floor) for pmf in composition.directions(composed)
    )
    orders = np.unique(np.geomspace(2, 4096, 100).astype(int))
    renyi = dp_accounting.rdp.RdpAccountant(orders.tolist())
    renyi.compose(dp_accounting.SelfComposedDpEvent(event.to_dp_event(), num_steps))
    divergences = np.asarray(renyi._rdp)

    def log_delta(levels: np.ndarray) -> np.ndarray:
        # Canonne, Kamath and Steinke 2020, Proposition 12.
        ratios = np.multiply.outer(orders - 1, levels) - ((orders - 1) * divergences)[:, None]
        constants = (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
        values = np.minimum(math.log(floor), (constants[:, None] - ratios).min(axis=0))
        near = levels < resolved
        if near.any():
            values[near] = np.log(composed.get_delta_for_epsilon(levels[near].tolist()))
        return values

    return log_delta
