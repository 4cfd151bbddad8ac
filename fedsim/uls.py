"""Algorithm 2, DP-SGD-ULS: user-level sampling, per-user clipping (Charles et al. 2024).

`els.py` and `uls.py` differ only where the paper's two algorithms differ: `diff` shows where. The
comments on the right are the paper's symbols. The loop over steps is in `training/`.
"""

from typing import Any

import numpy as np

from fedsim.accounting import StepEvent
from fedsim.clipping import Clip, Strategy
from fedsim.config import ZERO_OUT
from fedsim.engine import Engine, Stats
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.mechanism import NoisyMean, noisy_mean
from fedsim.noise import AddNoise, add_gaussian
from fedsim.sampling import Sampling, Users, draw_groups, too_few


class ULS:
    """DP-SGD with user-level sampling.

    Guarantees: T steps satisfy (epsilon, delta) user-level DP, with the epsilon and delta of T
      composed `event`s (Theorem 2), under either adjacency. Zero-out: a user without texts keeps a
      place, so N and the sampling probability depend on no text. Add-or-remove, as in the paper:
      N and the sampling probability are taken as public. Where examples have several owners, the
      theorem of docs/theory/owners.md takes its place.
    """

    def __init__(
        self,
        users: Users,
        *,
        batch_size: int,
        group_size: int,
        sampling: Sampling,
        key: SecretKey,
        adjacency: str = ZERO_OUT,
    ):
        """Fix the public constants of training.

        Args:
          users: N users and the examples of each.
          batch_size: the expected number of gradients of a step.
          group_size: the most examples of a user, in the pool (ELS) or in a step (ULS).
          sampling: how the units of a step are drawn.
          key: secret key of the run; pool, draws and noise depend on it. A run sets `self.key`
            to that of each segment.
          adjacency: zero-out or add-or-remove.
        Raises: ConfigError: batch_size does not fit group_size and the users.
        """
        self.group_size = group_size  # ............................................ G_ULS
        whole = batch_size % group_size == 0
        expect("batch_size", batch_size, whole, f"a multiple of group_size={group_size}")
        most = users.num_users * group_size
        limit = f"at most {most}, users x group_size{too_few(users)}"
        expect("batch_size", batch_size, batch_size <= most, limit)
        self.expected_cohort_size = batch_size // group_size  # ........................ M = q N
        self.sampler = sampling.over(users.num_users, self.expected_cohort_size)  # . q
        self.offsets = users.offsets
        self.key = key

    def event(self, noise_multiplier: float) -> StepEvent:
        """Return the accountant's event of one step: Theorem 2, Bernoulli(q)."""
        return self.sampler.event(noise_multiplier)

    def draw(self, step: int) -> np.ndarray:
        """Draw the sampling units of a step: example indices, int64 [users, group_size]."""
        cohort = self.sampler.draw(self.key, step)  # .............................. U^t
        return draw_groups(self.offsets, cohort, self.group_size, self.key, step)  # D_u^t

    def gradient(
        self,
        params: Any,
        step: int,
        engine: Engine,
        *,
        clip: Clip,
        noise_multiplier: float,
        strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
        add_noise: AddNoise = add_gaussian,  # ..................... N(0, (C sigma)^2 I)
        rows: np.ndarray | None = None,
    ) -> tuple[NoisyMean, Stats]:
        """Compute the privatised gradient of one step.

        Args:
          params: theta^t, tree of float32 arrays.
          step: t, from 0.
          engine: computes the clipped sum.
          clip: clip norm C and kind of clipping.
          noise_multiplier: sigma, in units of the sensitivity.
          strategy: how the clipped sum is computed.
          add_noise: independent or correlated Gaussian noise.
          rows: the result of `draw(step)`; None: drawn here.
        Returns: (g^t as released, per-unit statistics, which are not private).
        """
        rows = self.draw(step) if rows is None else rows
        grad_sum, stats = engine.clipped_sum(params, rows, clip, strategy)  # ...... g_sum^t
        grad = noisy_mean(  # ...................................................... g^t
            grad_sum,
            clip=clip,
            noise_multiplier=noise_multiplier,
            count=self.expected_cohort_size,
            key=self.key,
            step=step,
            add_noise=add_noise,
        )
        # Trainer._step writes the ledger, then theta^t+1 = update(theta^t, g^t).
        return grad, stats
