"""Algorithm 1, DP-SGD-ELS: example-level sampling, per-example clipping (Charles et al. 2024).

Read it beside its twin: `els.py` and `uls.py` differ where the paper's algorithms differ. The
comments on the right are the paper's symbols. The loop is in `training/`.
"""

from functools import partial
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
from fedsim.sampling import Sampling, Users, owners_of, pool_of, without_padding


class ELS:
    """DP-SGD with example-level sampling.

    Guarantees: T steps satisfy (epsilon, delta) user-level DP, with the epsilon and delta of T of
      its `event`s (Theorem 1), under either adjacency: zero-out, a user without texts keeping
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
        self.group_size = group_size  # ............................................ G_ELS
        self.pool = pool_of(users, group_size, key, adjacency)  # .................. D_sub
        most = len(self.pool)
        expect("batch_size", batch_size, batch_size <= most, f"<= {most}, the places of the pool")
        self.expected_batch_size = batch_size  # ................................... B = p |D_sub|
        owners = partial(owners_of, users.offsets, self.pool, group_size)
        self.sampler = sampling.over(most, self.expected_batch_size, owners)  # .... p
        self.key = drawing or key

    def event(self, noise_multiplier: float) -> StepEvent:
        """One step to the accountant: Theorem 1, Binomial(G_ELS, p)."""
        return self.sampler.event(noise_multiplier, max_contributions=self.group_size)

    def draw(self, step: int) -> np.ndarray:
        """Who takes part in a step: rows [examples, 1]."""
        batch = self.sampler.draw(self.key, step)  # ............................... S^t
        return without_padding(self.pool[batch])[:, None]  # ....................... z

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
        own = {"count": self.expected_batch_size, "noise_multiplier": noise_multiplier}
        grad = noisy_mean(grad_sum, clip=clip, add_noise=add_noise, **own, key=self.key, step=step)
        # Trainer._step: ledger, then theta^t+1 = update(theta^t, grad = g^t).
        return grad, stats
