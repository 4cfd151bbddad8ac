"""What the user left out is filled in here.

Where that looks at the data without protection, as the paper does, it is named: `Plan.non_private`.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from fedsim import accounting
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    INDEPENDENT,
    ONLY_USERS,
    POISSON,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
)
from fedsim.data import Dataset, decided_by_texts
from fedsim.errors import ConfigError, expect
from fedsim.keys import SecretKey
from fedsim.noise import Prediction, best, predictions
from fedsim.plan.options import assumed_share
from fedsim.plan.plan import events_before
from fedsim.sampling import Users, examples_per_user, graph_of, median_group_size, private_median


def complete(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    data: Dataset,
    *,
    key: SecretKey | None = None,
    pay: Callable[[float], None] | None = None,
) -> tuple[PrivacyConfig, list[str]]:
    """Fill in delta and group size; also returns all that the guarantee does not cover.

    Args:
      key: the run's; what group_size_epsilon asks for is drawn from it.
      pay: called with delta before that is drawn.
    """
    users = data.train
    if shared := graph_of(users) is not None:
        _expect_shared(privacy, data)
    population = privacy.assumed_population or users.num_users
    least = f">= {users.num_users}, the users there are"
    expect("assumed_population", population, population >= users.num_users, least)
    pool = " and the pool's size" if algorithm == Algorithm.ELS else ""
    counts = f"num_users={users.num_users}, num_examples={users.num_examples}{pool}"
    found = [f"{counts} (taken as public)"]
    if privacy.adjacency == ZERO_OUT:
        found = [f"num_examples={users.num_examples} (a count without noise)"]
    if shared:
        graph = f"{users.num_users} users, {users.num_examples} texts and who owns which of them"
        found = [f"{graph} (taken as public and fixed)"]
    times = ""
    if privacy.assumed_population is not None:
        found.append(f"assumed_population={population} (instead of the {users.num_users} users)")
        times = f", times {population / users.num_users:g}"
    delta, group_size = privacy.delta, privacy.group_size
    if delta is None:
        expect("delta", None, population > 1, "a value, since N^-1.1 of one user is 1")
        delta = population**-1.1
        if privacy.adjacency != ZERO_OUT:
            found.append(f"delta={delta:.3g} (N^-1.1 for the N users{times})")
    if (share := privacy.group_size_epsilon) is not None:
        expect("group_size_epsilon", share, algorithm == Algorithm.ELS, "nothing with uls")
        expect("group_size", group_size, group_size is None, "none, or no group_size_epsilon")
        assert key is not None, "a private choice needs a key"
        if pay is not None:
            pay(delta)
        group_size = private_median(examples_per_user(users), share, key.generator("median"))
        if privacy.adjacency == ZERO_OUT:
            # Room for the batch size, whatever was drawn: who is refused has paid for nothing.
            bands = privacy.bands or 1  # groups that take turns
            places = privacy.batch_size * bands
            group_size = max(group_size, -(-places // users.num_users))
    if group_size is None and algorithm == Algorithm.ELS:
        group_size = median_group_size(examples_per_user(users))
        if not shared:  # else it follows from what is public
            found.append(f"group_size={group_size} (the median user's number of examples)")
    if data.metadata.get("tokenizer", {}).get("trained_on_data"):
        found.append("the tokenizer (trained on the training users' text)")
    for name in filter(None, privacy.chosen_on_data.split(",")):
        found.append(f"{name} (chosen by looking at this data)")
    if key is not None and key.seed is not None:
        found.append("the seed (whoever knows or guesses it can take the noise away)")
    privacy = dataclasses.replace(privacy, delta=delta, group_size=group_size or 1)
    if privacy.sampling == ALLOCATION:
        privacy = allocated(algorithm, privacy, users.num_users)
    if privacy.bands is None and privacy.noise == CORRELATED and math.isfinite(privacy.epsilon):
        bands = best(bands_predicted(algorithm, privacy, users)).bands
        privacy = dataclasses.replace(privacy, bands=bands)
    return privacy, found


def allocated(algorithm: Algorithm, privacy: PrivacyConfig, num_users: int) -> PrivacyConfig:
    """The settings of random allocation, with participations and the batch size that follows.

    Raises: ConfigError: it is for users alone, and those that there are.
    """
    expect("sampling", ALLOCATION, algorithm == Algorithm.ULS, ONLY_USERS)
    assumed = privacy.assumed_population
    expect("assumed_population", assumed, assumed is None, f"none with {ALLOCATION} sampling")
    steps, each = privacy.num_steps, privacy.group_size or 1
    wanted = max(1, privacy.batch_size // each) / num_users * steps
    divisors = [count for count in range(1, steps + 1) if steps % count == 0]
    found = privacy.participations or min(divisors, key=lambda count: abs(math.log(count / wanted)))
    batch_size = each * max(1, round(num_users * found / steps))
    return dataclasses.replace(privacy, participations=found, batch_size=batch_size)


def bands_predicted(algorithm: Algorithm, privacy: PrivacyConfig, users: Users) -> list[Prediction]:
    """What correlated noise of several numbers of bands is predicted to give.

    Args: privacy: of `complete`, but for its bands.
    """
    assert privacy.delta is not None and privacy.group_size is not None, "complete() comes first"
    units, cap, each = users.num_users, 1, privacy.group_size
    if algorithm == Algorithm.ELS:
        cap, each = privacy.group_size, 1
        sizes = np.minimum(np.diff(users.offsets), cap)
        units = units * cap if privacy.adjacency == ZERO_OUT else int(sizes.sum())
    count = max(1, privacy.batch_size // each)
    share = assumed_share(privacy.assumed_population, users.num_users)

    def noise_multiplier(bands: int) -> float:
        return accounting.noise_multiplier(
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            num_steps=privacy.num_steps,
            sampling_prob=min(1.0, count / units) * share,
            max_contributions=cap,
            bands=bands,
            before=events_before(privacy.group_size_epsilon),
        )

    return predictions(noise_multiplier, privacy.num_steps, max(1, units // count))


def _expect_shared(privacy: PrivacyConfig, data: Dataset) -> None:
    """Raises ConfigError: the settings, or the rules by which the data were built, are not for
    texts with several owners."""
    where = "where texts have several owners"
    rules, screen = (data.metadata.get(name, {}) for name in ("rules", "screen"))
    if rule := decided_by_texts(rules.get("long_texts", "cut"), screen.get("against", ())):
        raise ConfigError(f"data: built with {rule} {where}", field="data")
    asked = {
        "adjacency": (privacy.adjacency, ZERO_OUT),
        "noise": (privacy.noise, INDEPENDENT),
        # In groups that take turns, a text would be in those of all its owners.
        "sampling": (privacy.sampling_run, POISSON),
    }
    for name, (value, only) in asked.items():
        expect(name, value, value == only, f"{only} {where}")
    bound = privacy.loss_bound  # a text without content has a loss, where nobody would have none
    expect("loss_bound", bound, bound is None, f"none {where}")
    share = privacy.group_size_epsilon
    expect(
        "group_size_epsilon", share, share is None, f"none {where}, for who owns which is public"
    )
