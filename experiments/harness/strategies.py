"""Strategies to split a batch size into G_ULS and M, with which Algorithm 3 is compared."""

import math
from collections.abc import Callable, Sequence

from fedsim.errors import expect
from fedsim.tuning.doubling import NO_LIMITS, START, Configuration, Limits, double, twice


def greedy_local_oracle(
    batch_size: int,
    loss: Callable[[Configuration], float],
    start: Configuration = START,
    limits: Limits = NO_LIMITS,
) -> Configuration:
    """Double whichever of G_ULS and M gives the lower loss after training.

    No local strategy does better; it costs a training for each configuration (Appendix F).
    """

    def prefer_group(at: Configuration) -> bool:
        group, cohort = (loss(next_) if next_ in limits else math.inf for next_ in twice(at))
        return group < cohort

    return double(batch_size, prefer_group, start, limits)


def with_batch_size(grid: Sequence[Configuration], batch_size: int) -> list[Configuration]:
    """Configurations of a grid that use exactly `batch_size` gradients, by group size.

    Raises: ConfigError: there is none.
    """
    matching = sorted(at for at in grid if at.batch_size == batch_size)
    expect("batch_size", batch_size, bool(matching), "a product G M of the grid")
    return matching


def max_cohort(grid: Sequence[Configuration], batch_size: int) -> Configuration:
    """The configuration with the most users and so the fewest examples of each (Appendix F)."""
    return with_batch_size(grid, batch_size)[0]


def max_group_size(grid: Sequence[Configuration], batch_size: int) -> Configuration:
    """The configuration with the most examples of a user and so the fewest users (Appendix F)."""
    return with_batch_size(grid, batch_size)[-1]
