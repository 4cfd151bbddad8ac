"""As the paper accounts, for comparison alone: as if there were more users than there are.

Such an epsilon does not hold, and no run of fedsim states it: a run has the epsilon that holds for
its noise, and only rows and figures of experiments have the paper's.
"""

import dataclasses
import math

from fedsim import accounting
from fedsim.config import Algorithm, PrivacyConfig
from fedsim.data import Dataset
from fedsim.keys import SecretKey
from fedsim.plan import fill_defaults, method_for
from fedsim.plan.planner import METHODS


def assuming(base: type, times: int) -> type:
    """ELS or ULS, accounted for as if there were `times` as many users."""

    class Assuming(base):
        def event(self, noise_multiplier: float) -> accounting.StepEvent:
            event = super().event(noise_multiplier)
            return dataclasses.replace(event, sampling_prob=event.sampling_prob / times)

    return Assuming


def epsilon_that_holds(
    algorithm: Algorithm, privacy: PrivacyConfig, data: Dataset, times: int
) -> float:
    """Epsilon, at the same delta, of the noise that would give `privacy.epsilon` to `times` as many
    users: what a run that is to have this noise is asked for."""
    if times == 1 or math.isinf(privacy.epsilon):
        return privacy.epsilon
    privacy, _ = fill_defaults(algorithm, privacy, data)
    assert privacy.delta is not None, "fill_defaults fills it in"
    base = METHODS[algorithm]
    key = SecretKey.create(0)  # the event depends on no draw
    method = method_for(algorithm, privacy, data.train, key, kind=assuming(base, times))
    noise = accounting.calibrate_noise(
        method.event,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=privacy.num_steps,
    )
    return accounting.epsilon([(base.event(method, noise), privacy.num_steps)], privacy.delta)
