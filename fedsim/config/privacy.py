"""What can change the guarantee: all of it is in the ledger, and fixed for the life of a run."""

import dataclasses
import enum
import math
from typing import Literal

from fedsim.config.flags import flags_of
from fedsim.config.run import RunConfig
from fedsim.errors import expect

POISSON, CYCLIC, ALLOCATION, SHUFFLE = "poisson", "cyclic", "allocation", "shuffle"
ONLY_USERS = "poisson or cyclic with els: of several texts at random steps no tight bound is known"
INDEPENDENT, CORRELATED = "independent", "correlated"
SamplingName = Literal["poisson", "cyclic", "allocation", "shuffle"]
COMPARISON_ONLY = "as if Poisson sampled: comparison only, not a guarantee"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """Who takes part in a step, and how its noise depends on that of other steps: what training,
    accounting, calibration and recommendations have in common."""

    sampling: SamplingName | None = None
    """Who takes part in a step. poisson: every unit by itself, with the same probability. cyclic:
    so, but of one of several groups of users, in turn. allocation (uls): every user in exactly
    `participations` steps, at random, one in each num_steps / participations. shuffle is the
    paper's comparison mode: epsilon as if Poisson sampled, not a guarantee. Default: poisson, or
    cyclic with correlated noise."""

    participations: int | None = None
    """K of random allocation: steps that each user takes part in. Divides num_steps; the batch
    size follows from it. Default: what comes closest to batch_size."""

    noise: Literal["independent", "correlated"] = "independent"
    """correlated: each step takes back part of the noise of the bands - 1 steps before, so that
    sums of gradients get less. For optimizers whose steps add up, such as momentum and sgd."""

    bands: int | None = None
    """b: groups of users in cyclic sampling, and steps that noise reaches. In [1, num_steps]; at
    most 1 over the share of users in a step. Default: with correlated noise as many as give the
    least predicted error, of at most 64; else 1."""

    @property
    def sampling_run(self) -> str:
        """The way of sampling: the one that was asked for, or what goes with the noise."""
        return self.sampling or (CYCLIC if self.noise == CORRELATED else POISSON)

    def expect_cell(self, num_steps: int | None) -> None:
        """Raises ConfigError: the settings do not go together, with the reason.

        Args: num_steps: None where they are to be found.
        """
        sampling, noise = self.sampling_run, self.noise
        if noise == CORRELATED and sampling == ALLOCATION:
            why = f"{INDEPENDENT} with {ALLOCATION}: both together are bounded by Monte Carlo alone"
            expect("noise", noise, False, why)
        if noise == CORRELATED:
            unknown = (
                "cyclic, or shuffle to compare: for users drawn in any step no bound is proven"
            )
            expect("sampling", sampling, sampling in (CYCLIC, SHUFFLE), unknown)
        if (count := self.participations) is not None:
            expect("participations", count, sampling == ALLOCATION, f"none with {sampling}")
            divides = count >= 1 and (num_steps is None or num_steps % count == 0)
            expect("participations", count, divides, f"to divide num_steps={num_steps}")
        if (bands := self.bands) is not None:
            grouped = sampling == CYCLIC or noise == CORRELATED
            why = f"none with {sampling} sampling: users are in no groups"
            expect("bands", bands, grouped, why)
            expect("bands", bands, bands >= 1, ">= 1")
            fits = num_steps is None or bands <= num_steps
            expect("bands", bands, fits, f"<= {num_steps}, the steps")


MOST_STEPS = 10**7
"""As many as can be accounted for."""

ZERO_OUT, ADD_OR_REMOVE = "zero-out", "add-or-remove"


class Algorithm(enum.StrEnum):
    """The two algorithms of the paper."""

    ELS = "els"
    ULS = "uls"


@dataclasses.dataclass(frozen=True)
class PrivacyTarget:
    """Privacy and compute budget of a training."""

    epsilon: float
    """Target user-level epsilon. > 0; 'inf' trains without noise: non-private, a sanity bound,
    which counts as infinite for its users from then on (see budget_ledger)."""

    num_steps: int
    """T: number of steps. In [1, 10000000]."""

    batch_size: int = 128
    """Expected gradients per step: B for ELS, where empty places of the pool count, or group size
    times cohort size for ULS. >= 1."""

    delta: float | None = None
    """In (0, 1). Default: N^-1.1 for N users, which the report calls weak: delta times N is then
    about 0.5. The paper's is n^-1.1 for n examples. For a release give one, such as 1e-6."""

    clipping: Literal["normalised", "plain"] = "normalised"
    """normalised: g min(1/C, 1/|g|), sensitivity 1 (De et al. 2022). plain: g min(1, C/|g|)."""

    max_changed: int = 1
    """k: ULS where texts have several owners: most groups of others in which texts of a user are.
    What does not fit is left out; more costs noise. >= 0."""

    def __post_init__(self):
        expect("epsilon", self.epsilon, self.epsilon > 0, "> 0, or inf for no noise")
        expect("num_steps", self.num_steps, self.num_steps >= 1, ">= 1")
        expect("num_steps", self.num_steps, self.num_steps <= MOST_STEPS, f"at most {MOST_STEPS}")
        expect("batch_size", self.batch_size, self.batch_size >= 1, ">= 1")
        if self.delta is not None:
            expect("delta", self.delta, 0 < self.delta < 1, "in (0, 1)")
        expect("max_changed", self.max_changed, self.max_changed >= 0, ">= 0")


@dataclasses.dataclass(frozen=True)
class PrivacyConfig(MechanismConfig, PrivacyTarget):
    """What can change the guarantee."""

    adjacency: Literal["zero-out", "add-or-remove"] = "zero-out"
    """What a user is compared with. zero-out: the same user without texts; how many users there are
    is public, and for ELS everyone has group_size places in the pool, empty ones among them.
    add-or-remove: nobody in their place; takes the numbers of users and examples as public."""

    group_size: int | None = None
    """G: most examples of a user, in all (ELS; default: the median user's) or a step (ULS; 1)."""

    clip_norm: float = 1.0
    """C: clip norm of an example's (ELS) or a user's (ULS) gradient. In [1e-6, 1e6]."""

    group_size_epsilon: float | None = None
    """ELS: choose the group size privately, as the median of users' numbers of examples, with this
    much of epsilon. > 0 and below epsilon. Default: group_size, or the median as it is."""

    clip_quantile: float | None = None
    """Move the clip norm, from clip_norm on, to this quantile of the norms of users' (ULS) or
    examples' (ELS) gradients, privately and within epsilon (Andrew et al. 2021). In (0, 1)."""

    loss_bound: float | None = None
    """Release the mean training loss of each step, too, privately and within epsilon: the metric
    privacy/loss. A user's (ULS) or example's (ELS) loss above this counts as it, in nats per token.
    > 0. Default: the loss is among the metrics that are not private alone."""

    eval_epsilon: float | None = None
    """Evaluate on held-out users with noise: what all evaluations of the run together may cost each
    of them, counted in the ledger of the data; at the run's delta, or N^-1.1 for N of them if that
    is smaller. At most eval_examples of their texts are looked at. > 0. Default: eval/loss is
    without noise, and not to be published."""

    eval_loss_bound: float | None = None
    """With eval_epsilon: a user's mean loss above this counts as it, in nats per token. > 0.
    Default: the loss of guessing uniformly."""

    assumed_population: int | None = None
    """Account as if the users had been drawn from so many, at least as many as there are, as the
    paper does for CC-News: an assumption, not a guarantee, and labelled so wherever epsilon is
    shown. Also of delta's default. Default: the users there are."""

    chosen_on_data: str = ""
    """Settings chosen by looking at this data without protection (group_size,clip_norm): nothing
    accounts for that, so the report says it. `fedsim recommend` fills this in."""

    def __post_init__(self):
        super().__post_init__()
        self.expect_cell(self.num_steps)
        # Far outside, float32 norms underflow or overflow, and clipping bounds nothing.
        expect("clip_norm", self.clip_norm, 1e-6 <= self.clip_norm <= 1e6, "in [1e-6, 1e6]")
        if self.group_size is not None:
            expect("group_size", self.group_size, self.group_size >= 1, ">= 1")
        if (share := self.group_size_epsilon) is not None:
            holds = 0 < share < self.epsilon
            expect("group_size_epsilon", share, holds, f"> 0 and below epsilon={self.epsilon}")
        if self.clip_quantile is not None:
            expect("clip_quantile", self.clip_quantile, 0 < self.clip_quantile < 1, "in (0, 1)")
        if (bound := self.loss_bound) is not None:
            expect("loss_bound", bound, 0 < bound < math.inf, "> 0 and finite")
        for name in ("eval_epsilon", "eval_loss_bound"):
            value = getattr(self, name)
            holds = value is None or 0 < value < math.inf
            expect(name, value, holds, "> 0 and finite")
        bound = self.eval_loss_bound
        holds = bound is None or self.eval_epsilon is not None
        expect("eval_loss_bound", bound, holds, "none without eval_epsilon")
        if (assumed := self.assumed_population) is not None:
            expect("assumed_population", assumed, assumed >= 1, ">= 1")
        names = flags_of(PrivacyConfig) | flags_of(RunConfig)
        for name in filter(None, self.chosen_on_data.split(",")):
            expect("chosen_on_data", name, name in names, "names of settings with commas between")
