"""Settings that can change the privacy guarantee, and with them all settings of a training.

They are in the ledger and fixed for the life of a run.
"""

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fedsim.config.load import config_of, unknown_setting
from fedsim.config.model import Count, Positive, Probability, flags_of, group
from fedsim.config.settings import RunConfig
from fedsim.errors import expect

POISSON, CYCLIC, ALLOCATION = "poisson", "cyclic", "allocation"
ONLY_USERS = "poisson or cyclic with els: of several texts at random steps no tight bound is known"
INDEPENDENT, CORRELATED = "independent", "correlated"
SamplingName = Literal["poisson", "cyclic", "allocation"]


@group(kw_only=True)
class MechanismConfig:
    """Sampling and noise of training, accounting, calibration and recommendations."""

    sampling: SamplingName | None = None
    """Way of drawing users (uls) or examples (els) for a step. poisson: each one independently,
    with the same probability. cyclic: the same, but steps draw in turn from `bands` groups of
    users. allocation (uls): each user in exactly `participations` steps, one at random in every
    num_steps / participations steps. Default: poisson, or cyclic with correlated noise."""

    participations: Count | None = None
    """Required with sampling=allocation: K, the number of steps that each user takes part in. >= 1;
    divides num_steps, and determines the batch size."""

    noise: Literal["independent", "correlated"] = "independent"
    """independent: fresh noise in each step. correlated: each step also subtracts part of the noise
    of the last bands - 1 steps, so that sums of gradients get less noise. Correlated noise suits
    optimizers that add gradients up (momentum, sgd)."""

    bands: Count | None = None
    """b: number of groups of users in cyclic sampling, and number of steps over which noise is
    correlated. In [1, num_steps], and at most num_users / users per step. Default: 1; with
    correlated noise, the number up to 64 with the least predicted noise."""

    @property
    def sampling_run(self) -> str:
        """The way of sampling: the given one, or the default for the kind of noise."""
        return self.sampling or (CYCLIC if self.noise == CORRELATED else POISSON)

    def check_combination(self, num_steps: int | None) -> None:
        """Raise ConfigError unless sampling, noise and their options go together. Args: num_steps:
        None where it is still to be calibrated."""
        sampling, noise = self.sampling_run, self.noise
        if noise == CORRELATED:
            unknown = "cyclic with correlated noise: of other sampling no bound is proven"
            expect("sampling", sampling, sampling == CYCLIC, unknown)
        if (count := self.participations) is not None:
            expect("participations", count, sampling == ALLOCATION, f"none with {sampling}")
            divides = num_steps is None or num_steps % count == 0
            expect("participations", count, divides, f"to divide num_steps={num_steps}")
        if (bands := self.bands) is not None:
            grouped = sampling == CYCLIC or noise == CORRELATED
            why = f"none with {sampling} sampling: users are in no groups"
            expect("bands", bands, grouped, why)
            fits = num_steps is None or bands <= num_steps
            expect("bands", bands, fits, f"<= {num_steps}, the steps")


MAX_STEPS = 10**7
"""Largest number of steps that the accountant supports."""

MAX_DELTA = 1e-6
"""Largest default of delta."""

ZERO_OUT, ADD_OR_REMOVE = "zero-out", "add-or-remove"


def default_delta(num_users: int) -> float:
    """min(1e-6, N^-1.1) for N users.

    >>> default_delta(1000), default_delta(10**6) < 3e-7
    (1e-06, True)
    """
    return min(MAX_DELTA, max(1, num_users) ** -1.1)


class Algorithm(enum.StrEnum):
    """The two algorithms of the paper."""

    ELS = "els"
    ULS = "uls"


@group()
class PrivacyTarget:
    """Privacy target of a training, and the compute that it may use."""

    epsilon: Annotated[float, Field(gt=0), BeforeValidator(lambda x: math.inf if x == "inf" else x)]
    """Target epsilon of user-level differential privacy; smaller is more private. > 0. inf: train
    without noise and without any guarantee; the privacy budget then counts this run as infinite for
    its users (see budget_ledger)."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    """T: number of training steps. In [1, 10000000]."""

    batch_size: Count = 128
    """Expected number of gradients per step: examples (els; B, empty places in the pool count), or
    group_size times users (uls; G M). >= 1."""

    delta: Probability | None = None
    """delta of (epsilon, delta): roughly the probability with which epsilon may fail to hold. In
    (0, 1). It should be far below 1 / num_users. Default: 1e-6, or num_users^-1.1 if that is
    smaller."""

    clipping: Literal["normalised", "plain"] = "normalised"
    """Rule that limits a gradient g to the clip norm C. normalised: g is multiplied by min(1/C,
    1/|g|), so that its norm is at most 1 (De et al. 2022). plain: g is multiplied by min(1, C/|g|),
    so that its norm is at most C."""

    max_shared_groups: Annotated[int, Field(ge=0)] = 1
    """With uls and texts of several owners: k, the largest number of other users' groups that may
    contain a user's texts. >= 0. Texts beyond it are left out; a larger k needs more noise."""


@group()
class PrivacyConfig(MechanismConfig, PrivacyTarget):
    """Settings that can change the privacy guarantee."""

    adjacency: Literal["zero-out", "add-or-remove"] = "zero-out"
    """Change of the data that the guarantee hides. zero-out: one user's texts are removed; the
    number of users is public, and with els each user has group_size places in the pool, some of
    them empty. add-or-remove: one user is added or removed; the numbers of users and of examples
    are taken as public."""

    group_size: Count | None = None
    """G: largest number of a user's examples in the whole training (els) or in one step (uls). >=
    1. Default: drawn privately as the median user's number of examples (els), 1 (uls)."""

    clip_norm: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """C: clip norm, the L2 norm to which an example's (els) or a user's (uls) gradient is limited.
    In [1e-6, 1e6]; far outside, float32 norms underflow or overflow."""

    group_size_epsilon: float | None = None
    """With els: part of epsilon spent on choosing group_size privately, as the median number of
    examples per user. In (0, epsilon). Default: without group_size, the larger of epsilon / 50 and
    36 / num_users, if that is at most epsilon / 10; of fewer users group_size is the smallest that
    batch_size fits."""

    clip_quantile: Probability | None = None
    """Adapt the clip norm privately, within epsilon: start from clip_norm and move it towards this
    quantile of the gradients' norms (Andrew et al. 2021). In (0, 1). Default: clip_norm stays as it
    is."""

    loss_bound: Positive | None = None
    """Release each step's mean training loss with noise, within epsilon, as the metric
    privacy/loss; a user's (uls) or an example's (els) loss is cut off at this bound, in nats per
    token. > 0. Default: the training loss is only among the non-private metrics."""

    eval_epsilon: Positive | None = None
    """Evaluate on held-out users with noise: the epsilon that all evaluations of the run together
    cost each held-out user, separate from `epsilon`, which is for the training users. > 0. At the
    run's delta, or the default for the held-out users if that is smaller; counted in the budget
    ledger.
    Default: evaluations have no noise, and eval/loss must not be published."""

    eval_loss_bound: Positive | None = None
    """With eval_epsilon: bound at which a user's mean loss is cut off, in nats per token. > 0.
    Default: the loss of a uniform guess, log(vocabulary size)."""

    tuned_on_data: str = ""
    """Names of settings that were chosen by looking at this data without noise, such as
    group_size,clip_norm. The choice is not part of epsilon; the report says so. `fedsim recommend`
    fills this in."""

    def __post_init__(self):
        self.check_combination(self.num_steps)
        if (share := self.group_size_epsilon) is not None:
            holds = 0 < share < self.epsilon
            expect("group_size_epsilon", share, holds, f"> 0 and below epsilon={self.epsilon}")
        bound = self.eval_loss_bound
        holds = bound is None or self.eval_epsilon is not None
        expect("eval_loss_bound", bound, holds, "none without eval_epsilon")
        names = flags_of(PrivacyConfig) | flags_of(RunConfig)
        for name in filter(None, self.tuned_on_data.split(",")):
            expect("tuned_on_data", name, name in names, "names of settings with commas between")


def configs_of(settings: Mapping[str, Any]) -> tuple[PrivacyConfig, RunConfig]:
    """The two configs that settings of a training describe. Raises: ConfigError: as `config_of`."""
    known = flags_of(PrivacyConfig) | flags_of(RunConfig)
    for name in settings.keys() - known.keys():
        raise unknown_setting(name, settings[name], known)
    privacy, run = (
        {name: value for name, value in settings.items() if name in flags_of(kind)}
        for kind in (PrivacyConfig, RunConfig)
    )
    return config_of(PrivacyConfig, privacy), config_of(RunConfig, run)
