"""Estimates of `recommend` at the starting model: gradient norms and noise.

Norms: L_ULS(G) is the median over a sample of users of the norm of their mean gradient over at most
G examples; L_ELS the same over single examples. They are not private: users' norms without noise.

Noise (Section 3, Equation 7): with Lipschitz losses and clip norms at the Lipschitz constants, both
algorithms spend `batch_size` gradients per step, and their noise per coordinate has variance
(sigma_ELS L_ELS / B)^2 and (sigma_ULS L_ULS / M)^2, without the variance of the gradient itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fedsim.clipping import Clip, Strategy
from fedsim.engine import At, Engine, EngineError, ignore
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.sampling import PADDING, draw_groups

NUM_USERS = 128
"""Size of the sample of users in the paper."""
FEW_USERS = 16
"""The same for a pretrained model, whose gradients take seconds on a CPU and have alike norms: of
SmolLM2's on chats, 95 % of the medians of 16 were within 10 % of that of 64."""

ANY_CLIP = Clip(1.0, normalised=True)
"""Norms are measured before clipping."""
STRATEGY = Strategy("direct", 4)
BATCH = 16


class GradientNorms:
    """Estimates of gradient norms from one sample of users, each computed once."""

    def __init__(
        self,
        engine: Engine,
        params: Any,
        offsets: np.ndarray,
        key: SecretKey,
        *,
        num_users: int = NUM_USERS,
        max_group_size: int = 1,
        phase: Callable[[str], AbstractContextManager[At]] = lambda what: nullcontext(ignore),
    ):
        """
        Args:
          params: theta, the starting model.
          offsets: int64 [users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
          max_group_size: the largest group size that will be needed.
          phase: shows what is estimated, and how much of it is done.
        Raises: ConfigError: no user has an example.
        """
        self._engine, self._params, self._offsets, self._key = engine, params, offsets, key
        self._phase = phase
        sizes = np.diff(offsets)
        owners = np.flatnonzero(sizes)
        empty = f"{len(sizes)} users without examples"
        expect("offsets", empty, len(owners) > 0, "a user with an example")
        rng = key.generator("norms: users")
        self._users = np.sort(rng.choice(owners, min(num_users, len(owners)), replace=False))
        # Padded to one width, groups of all sizes share a compiled program: passes over padding
        # alone are skipped.
        self._width = max(1, min(max_group_size, int(sizes[self._users].max())))
        self._user_norms: dict[int, float] = {}

    def user_norm(self, group_size: int) -> float:
        """L_ULS(G): psi over the sampled users of |mean gradient of at most G of their examples|.

        Source: Charles et al. 2024, Appendix F.
        """
        if group_size in self._user_norms:
            return self._user_norms[group_size]
        groups = draw_groups(self._offsets, self._users, group_size, self._key, group_size)
        width = max(self._width, int((groups >= 0).sum(axis=1).max(initial=0)))
        rows = np.full((len(groups), 1 if group_size == 1 else width), PADDING, np.int64)
        rows[:, : groups.shape[1]] = groups[:, : rows.shape[1]]
        self._user_norms[group_size] = self._estimate(rows, f"users by {group_size} texts")
        return self._user_norms[group_size]

    def example_norm(self, pool: np.ndarray) -> float:
        """L_ELS: psi over as many examples of `pool` (D_sub) of the norm of their gradients."""
        rng = self._key.generator("norms: examples")
        number = min(len(self._users), len(pool))
        rows = rng.choice(pool, number, replace=False)
        return self._estimate(rows[:, None], "single texts")

    def _estimate(self, rows: np.ndarray, what: str) -> float:
        """The median norm of the gradients of rows."""
        norms = []
        with self._phase(f"gradient norms of {what}") as at:
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                _, stats = self._engine.clipped_sum(self._params, batch, ANY_CLIP, STRATEGY)
                norms.append(stats.norms[~stats.dropped])
                at(start + len(batch), len(rows))
        finite = np.concatenate(norms)
        finite = finite[np.isfinite(finite)]
        if not len(finite):
            raise EngineError(f"no gradient of {len(rows)} units ({what}) is finite")
        return float(np.median(finite))  # psi of Appendix F


def noise_stddev(grad_norm: float, noise_multiplier: float, count: float) -> float:
    """L sigma / count: standard deviation per coordinate of a step's noise, in the gradient's unit.

    ELS has less noise than ULS where this is smaller; with B = G_ULS M that is Equation 7,
    L_ELS sigma_ELS <= G_ULS L_ULS sigma_ULS.
    Args:
      grad_norm: L_ELS or L_ULS, the clip norm.
      count: B or M.
    """
    return grad_norm * noise_multiplier / count
