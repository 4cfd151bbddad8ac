"""Both algorithms as the paper's heuristics set them, for the experiments that compare them."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from experiments import finetuning
from experiments.finetuning import Arguments, Training
from experiments.harness.rows import Rows
from fedsim.config import RunConfig
from fedsim.run import Console
from fedsim.sampling import median_group_size
from fedsim.tuning import doubling
from fedsim.tuning.estimates import GradientNorms
from fedsim.tuning.recommend import started


def cells_of(
    budgets: Sequence[int],
    training: Training,
    arguments: Arguments,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Rows:
    """Both algorithms at every data set, epsilon and budget, set by the paper's heuristics: the
    median user for G_ELS, Estimate-and-Double for G_ULS. `extra` is of every cell."""
    cells = []
    for name in training.num_steps:
        where = [
            {"dataset": name, "epsilon": epsilon, "budget": budget, **extra}
            for epsilon, budget in itertools.product(training.epsilons, budgets)
        ]
        if arguments.dry_run:  # the data are not looked at
            cells += [{**each, "algorithm": own} for each in where for own in ("els", "uls")]
            continue
        chosen = groups_of(name, budgets, training, arguments, extra)
        for each in where:
            els, uls = chosen[each["epsilon"], each["budget"]]
            cells.append({**each, "algorithm": "els", "group_size": els})
            cells.append({**each, "algorithm": "uls", "group_size": uls})
    return cells


@functools.cache
def user_grad_norms(run: RunConfig, groups: tuple[int, ...]) -> dict[int, float]:
    """L_ULS by group size, which depends on neither epsilon nor population."""
    with started(run, Console()) as start:
        users = start.data.train.offsets
        assert start.workers is not None
        norms = GradientNorms(
            start.workers, start.params, users, start.key, max_group_size=max(groups)
        )
        return {group: norms.user_norm(group) for group in groups}


def groups_of(
    name: str,
    budgets: Sequence[int],
    training: Training,
    arguments: Arguments,
    extra: Mapping[str, Any],
) -> dict[tuple[float, int], tuple[int, int]]:
    """(G_ELS, G_ULS) by (epsilon, budget)."""
    users = finetuning.open_data(name, arguments, training).train
    times = extra.get("times") or dict(training.assumed_times).get(name, 1)
    delta = extra.get("delta") or finetuning.delta_of(name, training, arguments)
    first = doubling.Configuration(1, min(doubling.START.cohort_size, *budgets))
    groups = [2**n for n in range((max(budgets) // first.cohort_size).bit_length())]
    run = finetuning.run_of(name, arguments, training, training.seeds[0])
    norms = user_grad_norms(run, tuple(groups))
    limits = doubling.Limits(groups[-1], users.num_users)
    median = median_group_size(np.diff(users.offsets))
    found = {}
    for epsilon in training.epsilons:
        noise = doubling.uls_noise(
            epsilon, delta, training.num_steps[name], times * users.num_users
        )
        for budget in budgets:
            chosen = doubling.estimate_and_double(budget, norms.__getitem__, noise, first, limits)
            found[epsilon, budget] = median, chosen.group_size
    return found
