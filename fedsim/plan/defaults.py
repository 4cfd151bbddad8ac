"""Defaults for the privacy settings that the user left out, and warnings about settings.

Where a default looks at the data without noise, as in the paper, that is a fact in
`Plan.non_private`.
"""

import dataclasses
import math

import numpy as np

from fedsim import accounting
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    INDEPENDENT,
    MAX_DELTA,
    ONLY_USERS,
    POISSON,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
    default_delta,
)
from fedsim.data import Dataset, decided_by_texts, tokenizer_is_public
from fedsim.errors import ConfigError, expect
from fedsim.keys import SecretKey
from fedsim.noise import Prediction, best, predicted_error, predictions
from fedsim.plan.facts import Caveat, Fact
from fedsim.plan.plan import Plan, events_before
from fedsim.sampling import (
    FEW_USERS,
    Users,
    examples_per_user,
    graph_of,
    median_group_size,
    private_median,
    rank_error,
)

MISS = 1 / 4
"""Largest share of the users between the private median and the median, as a rule."""
MIN_SHARE, MAX_SHARE = 0.02, 0.1
"""Parts of epsilon that the private median costs at least, and at most."""
MUCH_NOISE = 0.5
"""Ratio of noise to signal from which on a training learns in part at most."""


def with_group_size(algorithm: Algorithm, privacy: PrivacyConfig, users: Users) -> PrivacyConfig:
    """Settings with a default for the group size of ELS that looks at no text.

    That is the private median, for the part of epsilon with which it misses by `MISS` at most, or,
    of too few users for that, the smallest group size that the batch size fits.
    """
    if (share := privacy.group_size_epsilon) is not None:
        expect("group_size_epsilon", share, algorithm == Algorithm.ELS, "nothing with uls")
        given = privacy.group_size
        expect("group_size", given, given is None, "none, or no group_size_epsilon")
        return privacy
    public = graph_of(users) is not None or math.isinf(privacy.epsilon)
    if algorithm != Algorithm.ELS or privacy.group_size is not None or public:
        return privacy
    least = rank_error(1.0) / (MISS * users.num_users)
    share = max(least, MIN_SHARE * privacy.epsilon)
    if share <= MAX_SHARE * privacy.epsilon:
        return dataclasses.replace(privacy, group_size_epsilon=share)
    return dataclasses.replace(privacy, group_size=smallest_group_size(privacy, users))


def private_group_size(privacy: PrivacyConfig, users: Users, key: SecretKey) -> int:
    """Draw the group size of ELS. Args: key: of the run, which alone determines the draw."""
    assert privacy.group_size_epsilon is not None, "of settings with a private group size"
    rng = key.generator("median")
    median = private_median(examples_per_user(users), privacy.group_size_epsilon, rng)
    if privacy.adjacency != ZERO_OUT:
        return median
    # Make room for the batch size whatever was drawn, so that no run is refused because of the
    # draw: a refused run would have paid for nothing.
    return max(median, smallest_group_size(privacy, users))


def smallest_group_size(privacy: PrivacyConfig, users: Users) -> int:
    """The smallest group size whose pool has room for the batch size."""
    return -(-privacy.batch_size * (privacy.bands or 1) // users.num_users)


def fill_defaults(
    algorithm: Algorithm, privacy: PrivacyConfig, data: Dataset
) -> tuple[PrivacyConfig, list[Caveat]]:
    """Fill in delta, group size, bands, and the batch size of random allocation.

    Args: privacy: with the group size that was drawn, if it is private.
    Returns: the completed settings, and the facts of these settings and data that the guarantee
      does not cover.
    Raises: ConfigError: the settings do not fit the data or each other.
    """
    users = data.train
    if graph_of(users) is not None:
        _expect_shared(privacy, data)
    facts = facts_of(privacy, data)
    delta = default_delta(users.num_users) if privacy.delta is None else privacy.delta
    group_size = privacy.group_size
    if group_size is None:
        assert privacy.group_size_epsilon is None, "private_group_size() comes first"
        els = algorithm == Algorithm.ELS
        group_size = median_group_size(examples_per_user(users)) if els else 1
        if els and graph_of(users) is None:  # else the median follows from the public graph
            facts.append(Caveat(Fact.GROUP_SIZE))
    privacy = dataclasses.replace(privacy, delta=delta, group_size=group_size)
    if privacy.sampling == ALLOCATION:
        privacy = allocated(algorithm, privacy, users.num_users)
    if privacy.bands is None and privacy.noise == CORRELATED and math.isfinite(privacy.epsilon):
        bands = best(bands_predicted(algorithm, privacy, users)).bands
        privacy = dataclasses.replace(privacy, bands=bands)
    return privacy, facts


def facts_of(privacy: PrivacyConfig, data: Dataset) -> list[Caveat]:
    """Facts of settings and data that the guarantee does not cover, whatever is drawn.

    Args: privacy: as given, without defaults.
    """
    users, metadata = data.train, data.metadata
    shared, hides_users = graph_of(users) is not None, privacy.adjacency != ZERO_OUT
    # Either decided by texts who the users are.
    least_texts = metadata.get("rules", {}).get("min_examples", 1)
    skipped = bool(metadata.get("settings", {}).get("skip_unknown"))
    chosen = privacy.tuned_on_data.split(",")
    small = privacy.delta is None and default_delta(users.num_users) < MAX_DELTA
    holding = {
        Caveat(Fact.OWNERS): shared,
        Caveat(Fact.COUNTS): hides_users and not shared,
        Caveat(Fact.MIN_EXAMPLES, str(least_texts)): least_texts > 1,
        Caveat(Fact.SKIP_UNKNOWN): skipped,
        Caveat(Fact.DELTA): small and hides_users,  # else N is public
        Caveat(Fact.TOKENIZER): not tokenizer_is_public(metadata),
        **{Caveat(Fact.TUNED_ON_DATA, name): bool(name) for name in chosen},
    }
    return [caveat for caveat, holds in holding.items() if holds]


def allocated(algorithm: Algorithm, privacy: PrivacyConfig, num_users: int) -> PrivacyConfig:
    """Settings of random allocation, with the batch size that follows from participations.

    Raises: ConfigError: the algorithm is not ULS, or participations are missing.
    """
    expect("sampling", ALLOCATION, algorithm == Algorithm.ULS, ONLY_USERS)
    steps, count = privacy.num_steps, privacy.participations
    expect("participations", count, count is not None, f"a divisor of num_steps={steps}")
    users = max(1, round(num_users * (count or 1) / steps))
    return dataclasses.replace(privacy, batch_size=(privacy.group_size or 1) * users)


def bands_predicted(algorithm: Algorithm, privacy: PrivacyConfig, users: Users) -> list[Prediction]:
    """Predicted noise multiplier and error of correlated noise for several numbers of bands.

    Args: privacy: from `fill_defaults`; its bands are ignored.
    """
    assert privacy.delta is not None and privacy.group_size is not None, "fill_defaults comes first"
    units, cap, rows = users.num_users, 1, privacy.group_size
    if algorithm == Algorithm.ELS:
        cap, rows = privacy.group_size, 1
        sizes = np.minimum(np.diff(users.offsets), cap)
        units = units * cap if privacy.adjacency == ZERO_OUT else int(sizes.sum())
    count = max(1, privacy.batch_size // rows)

    def noise_multiplier(bands: int) -> float:
        return accounting.noise_multiplier(
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            num_steps=privacy.num_steps,
            sampling_prob=min(1.0, count / units),
            max_contributions=cap,
            bands=bands,
            before=events_before(privacy.group_size_epsilon),
        )

    return predictions(noise_multiplier, privacy.num_steps, max(1, units // count))


def _expect_shared(privacy: PrivacyConfig, data: Dataset) -> None:
    """Raise ConfigError if settings or data do not support texts with several owners."""
    where = "where texts have several owners"
    if rule := decided_by_texts(data.metadata.get("rules", {}).get("long_texts", "cut")):
        raise ConfigError(f"data: built with {rule} {where}", field="data")
    required = {
        "adjacency": (privacy.adjacency, ZERO_OUT),
        "noise": (privacy.noise, INDEPENDENT),
        # In groups that take turns, a text would be in those of all its owners.
        "sampling": (privacy.sampling_run, POISSON),
        # A text without content has a loss, where nobody would have none.
        "loss_bound": (privacy.loss_bound, None),
        "group_size_epsilon": (privacy.group_size_epsilon, None),  # who owns which is public
    }
    for name, (value, only) in required.items():
        expect(name, value, value == only, f"{only or 'none'} {where}")


def warnings_of(plan: Plan) -> list[str]:
    """Warnings about plans that are valid but probably not intended.

    If all steps agree, the sum of T mean gradients, each of norm C at most, has norm T C. The noise
    on it has the same size in each of d directions; where it is larger, little is learnt.
    """
    if not plan.noise_multiplier:
        return []
    warnings, users = [], plan.num_users
    if plan.delta > 1 / users:
        warnings.append(
            f"delta={plan.delta:g} is above 1/{users}: it allows publishing all texts of one of "
            f"{users:,} users; the default is {default_delta(users):.2g}"
        )
    error = predicted_error(plan.noise_multiplier, plan.num_steps, plan.noise.bands)
    ratio = error / plan.expected_count * math.sqrt(plan.num_parameters) / plan.num_steps
    if ratio >= MUCH_NOISE:
        few = f" ({users:,} are few, hundreds are needed)" if users < FEW_USERS else ""
        warnings.append(
            f"much noise: over all steps it adds up to {ratio:,.1f} times the largest possible sum "
            f"of updates; more users{few} or steps, a larger batch_size or a small lora_rank help"
        )
    return warnings
