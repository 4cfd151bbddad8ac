"""Algorithm 2, DP-SGD-ULS: user-level sampling, per-user clipping (Charles et al. 2024).

Read it beside its twin: `els.py` and `uls.py` differ where the paper's algorithms differ. The
comments on the right are the paper's symbols. The loop is in `training/`.
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
from fedsim.sampling import Sampling, Users, draw_groups


class ULS:
    """DP-SGD with user-level sampling.

    Guarantees: T steps satisfy (epsilon, delta) user-level DP, with the epsilon and delta of T of
      its `event`s (Theorem 2), under either adjacency: zero-out, a user without texts keeping
      their place, so that N and the probabilities depend on nobody's texts; or add-or-remove of one
      user, as in the paper, with those taken as public. Where examples have several
      owners, of the theorem in docs/theory/owners.md.
    """

    def __init__(
        self,
        users: Users,
        *,
        batch_size: int,
        group_size: int,
        sampling: Sampling,
        key: SecretKey,
        drawing: SecretKey | None = None,
        adjacency: str = ZERO_OUT,
    ):
        """Args: drawing: the key of the steps, if it is another than that of pool or groups."""
        self.group_size = group_size  # ............................................ G_ULS
        whole = batch_size % group_size == 0
        expect("batch_size", batch_size, whole, f"a multiple of group_size={group_size}")
        most = users.num_users * group_size
        expect("batch_size", batch_size, batch_size <= most, f"<= {most}, group_size x the users")
        self.expected_cohort_size = batch_size // group_size  # ........................ M = q N
        self.sampler = sampling.over(users.num_users, self.expected_cohort_size)  # . q
        self.offsets = users.offsets
        self.key = drawing or key

    def event(self, noise_multiplier: float) -> StepEvent:
        """One step to the accountant: Theorem 2, Bernoulli(q)."""
        return self.sampler.event(noise_multiplier)

    def draw(self, step: int) -> np.ndarray:
        """Who takes part in a step: rows [users, group]."""
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
        """The privatised gradient of one step, and the engine's statistics of it.

        Args: rows: those of `draw(step)`, if they have been drawn already.
        """
        rows = self.draw(step) if rows is None else rows
        grad_sum, stats = engine.clipped_sum(params, rows, clip, strategy)  # ...... g_sum^t
        own = {"count": self.expected_cohort_size, "noise_multiplier": noise_multiplier}
        grad = noisy_mean(grad_sum, clip=clip, add_noise=add_noise, **own, key=self.key, step=step)
        # Trainer._step: ledger, then theta^t+1 = update(theta^t, grad = g^t).
        return grad, stats
