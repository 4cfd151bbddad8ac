"""The paper's heuristics (Section 5) on one data set: group sizes, and what noise comes of them.

All of it looks at the data without protection, as the paper does, and says so.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.config import ZERO_OUT, Algorithm, PrivacyConfig
from fedsim.data import Dataset
from fedsim.keys import SecretKey
from fedsim.plan import complete
from fedsim.sampling import Users, graph_of, groups_of, pool_of
from fedsim.tuning import doubling
from fedsim.tuning.estimates import GradientNorms, noise_stddev

LEAST_COHORT = 8  # of the curve that is drawn: below, its noise is of no interest


def units_of(privacy: PrivacyConfig, users: Users, key: SecretKey | None) -> Users:
    """The sampling units of ULS with their examples: the users, or, where texts have several
    owners, those who have a group. Args: key: what groups are drawn with."""
    if graph_of(users) is None:
        return users
    assert key is not None, "groups need a key"
    return groups_of(users, privacy.max_changed, key)


@dataclasses.dataclass(frozen=True)
class Heuristics:
    """What they say of one data set."""

    privacy: PrivacyConfig
    data: Dataset
    norms: GradientNorms | None
    """None: no gradient is looked at."""
    key: SecretKey | None = None
    """What groups and pools are drawn with, where texts have several owners."""

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Examples of each sampling unit of ULS: of each user."""
        return np.diff(units_of(self.privacy, self.data.train, self.key).offsets)

    def els(self) -> tuple[PrivacyConfig, list[str]]:
        """Settings of ELS by the median heuristic; what of them was read off the data."""
        settings, non_private = complete(Algorithm.ELS, self.privacy, self.data)
        assert settings.group_size is not None
        most = self._places(settings.group_size)
        settings = dataclasses.replace(settings, batch_size=min(settings.batch_size, most))
        looked = ["clip_norm (median gradient norms of a sample)"] if self.norms else []
        return settings, [*non_private, *looked]

    def single(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS with one example of each user: nothing of gradients need be known."""
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        batch_size = min(settings.batch_size, len(self.sizes))
        return dataclasses.replace(settings, group_size=1, batch_size=batch_size), [], non_private

    def uls(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS by Estimate-and-Double, its turns; what of them was read off the data.

        The paper's batch sizes are powers of two. For any other, M is what the size allows at the
        group size that was found.
        """
        assert self.norms is not None
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        batch_size, users = settings.batch_size, len(self.sizes)
        start = doubling.Configuration(1, min(doubling.START.cohort_size, users))
        limits = doubling.Limits(max(1, int(self.sizes.max())), users)
        chosen, turns = doubling.estimate_and_double(
            batch_size, self.norms.user_norm, self._noise(), start, limits
        )
        cohort = max(1, min(batch_size // chosen.group_size, users))
        settings = dataclasses.replace(
            settings, group_size=chosen.group_size, batch_size=chosen.group_size * cohort
        )
        group = f"group_size={chosen.group_size} of ULS (gradient norms of a sample of users)"
        return settings, turns, [*non_private, group]

    def curve(self, example_norm: float) -> list[dict[str, Any]]:
        """Noise per step of both algorithms at group sizes that are powers of two."""
        assert self.norms is not None
        rows, sizes, uls_noise = [], self.sizes, self._noise()
        batch_size, users = self.privacy.batch_size, len(self.sizes)
        for group in (2**n for n in range(int(sizes.max()).bit_length())):
            if batch_size <= (pool := self._places(group)):
                real = batch_size * filled(self.privacy, self.data.train, group)
                noise = noise_stddev(example_norm, self._els_sigma(batch_size / pool, group), real)
                rows.append({"algorithm": "ELS", "group_size": group, "noise_per_step": noise})
            cohort = batch_size // group
            if LEAST_COHORT <= cohort <= users:
                noise = self.norms.user_norm(group) * uls_noise(cohort)
                rows.append({"algorithm": "ULS", "group_size": group, "noise_per_step": noise})
        return rows

    def _places(self, group_size: int) -> int:
        """Places of the pool of ELS."""
        if graph_of(self.data.train) is not None:
            assert self.key is not None, "a pool needs a key"
            return len(pool_of(self.data.train, group_size, self.key, ZERO_OUT))
        if self.privacy.adjacency == ZERO_OUT:
            return len(self.sizes) * group_size
        return int(np.minimum(self.sizes, group_size).sum())

    def _noise(self) -> Callable[[int], float]:
        completed, _ = complete(Algorithm.ULS, self.privacy, self.data)
        assert completed.delta is not None
        shared = graph_of(self.data.train) is not None
        return doubling.uls_noise(
            completed.epsilon,
            completed.delta,
            completed.num_steps,
            len(self.sizes),
            completed.max_changed if shared else 0,
        )

    def _els_sigma(self, sampling_prob: float, group_size: int) -> float:
        completed, _ = complete(Algorithm.ELS, self.privacy, self.data)
        assert completed.delta is not None
        return accounting.noise_multiplier(
            epsilon=completed.epsilon,
            delta=completed.delta,
            num_steps=completed.num_steps,
            sampling_prob=sampling_prob,
            max_contributions=group_size,
        )


def filled(privacy: PrivacyConfig, users: Users, group_size: int) -> float:
    """The share of the places in the pool of ELS that has an example."""
    if privacy.adjacency != ZERO_OUT or graph_of(users) is not None:
        return 1.0
    return float(np.minimum(np.diff(users.offsets), group_size).mean() / group_size)


def share_used(
    algorithm: Algorithm, sizes: np.ndarray, group_size: int, sampling_prob: float, num_steps: int
) -> float:
    """Expected share of the training examples that takes part in at least one step.

    ELS: an example is in the pool with probability min(1, G / n_u), and then in each step with p.
    ULS: it is in a step with q min(1, G / n_u), a fresh draw each time.
    """
    sizes = sizes[sizes > 0]
    kept = np.minimum(1, group_size / sizes)
    if algorithm == Algorithm.ELS:
        seen = kept * -np.expm1(num_steps * np.log1p(-min(sampling_prob, 1 - 1e-12)))
    else:
        seen = -np.expm1(num_steps * np.log1p(-np.minimum(sampling_prob * kept, 1 - 1e-12)))
    return float((sizes * seen).sum() / sizes.sum())
