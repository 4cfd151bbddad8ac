"""Gradient norms at the starting model, through an engine: what Estimate-and-Double estimates.

L_ULS(G) is the median over a sample of users of the norm of their mean gradient over at most G
examples; L_ELS the same over single examples. Not private: users' norms without noise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedsim.clipping import Clip, Strategy
from fedsim.engine.engine import Engine, EngineError
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.sampling import PADDING, draw_groups

NUM_USERS = 128
"""How many users the paper samples."""

_ANY = Clip(1.0, normalised=True)  # norms are taken before clipping
_STRATEGY = Strategy("scan", 2)  # one program for all group sizes, and little padding

Estimator = Callable[[np.ndarray], Any]


class GradientNorms:
    """Estimates of gradient norms from one sample of users, each computed once.

    Attributes: gradients: how many have been computed.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        offsets: np.ndarray,
        key: SecretKey,
        *,
        num_users: int = NUM_USERS,
        most: int = 1,
        estimator: Estimator = np.median,
        examples: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        """
        Args:
          params: theta, the starting model.
          offsets: int64 [users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
          most: the largest group size that will be asked for.
          estimator: psi of Appendix F, from the norms [users] to one number; the paper's is median.
          examples: from places among `offsets` to examples, where these are not the same.
        Raises: ConfigError: no user has an example.
        """
        self._examples = examples or (lambda places: places)
        self._engine, self._params, self._offsets, self._key = engine, params, offsets, key
        self._estimator = estimator
        sizes = np.diff(offsets)
        owners = np.flatnonzero(sizes)
        expect(
            "offsets",
            f"{len(sizes)} users without examples",
            len(owners) > 0,
            "a user with an example",
        )
        rng = key.generator("norms: users")
        self._users = np.sort(rng.choice(owners, min(num_users, len(owners)), replace=False))
        # Padded to one width, groups of all sizes share a compiled program: passes over padding
        # alone are skipped.
        self._width = max(1, min(most, int(sizes[self._users].max())))
        self.gradients = 0
        self._user_norms: dict[int, float] = {}

    def user_norm(self, group_size: int) -> float:
        """L_ULS(G): psi over the sampled users of |mean gradient of at most G of their examples|.

        Source: Charles et al. 2024, Appendix F.
        """
        if group_size not in self._user_norms:
            self._user_norms[group_size] = self._estimate_user_norm(group_size)
        return self._user_norms[group_size]

    def _estimate_user_norm(self, group_size: int) -> float:
        groups = draw_groups(self._offsets, self._users, group_size, self._key, group_size)
        used = max(self._width, int((groups >= 0).sum(axis=1).max()))
        rows = np.full((len(groups), used), PADDING, np.int64)
        rows[:, : groups.shape[1]] = self._examples(groups[:, :used])
        return self._estimate(rows, f"group size {group_size}")

    def example_norm(self, pool: np.ndarray) -> float:
        """L_ELS: psi over as many examples of `pool` (D_sub) of the norm of their gradients."""
        rng = self._key.generator("norms: examples")
        number = min(len(self._users), len(pool))
        rows = np.full((number, self._width), PADDING, np.int64)
        rows[:, 0] = rng.choice(pool, number, replace=False)
        return self._estimate(rows, "single examples")

    def _estimate(self, rows: np.ndarray, what: str) -> float:
        _, stats = self._engine.clipped_sum(self._params, rows, _ANY, _STRATEGY)
        self.gradients += int(stats.num_rows.sum())
        norms = stats.norms[~stats.dropped]
        if not len(norms):
            raise EngineError(f"no gradient of {len(rows)} units ({what}) is finite")
        return float(self._estimator(norms))
