"""Ways of sampling and kinds of noise: what `recommend` says of them is what training does."""

import dataclasses
from pathlib import Path

import pytest
from problems import users_of_sizes

from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.keys import SecretKey
from fedsim.noise import predicted_error
from fedsim.plan import fill_defaults, make_plan, method_for
from fedsim.tuning import advice
from fedsim.tuning.advice import compare

USERS, PARAMETERS = users_of_sizes([3] * 400), 5000


def completed(algorithm, **changes):
    """(settings, data)"""
    settings = {"epsilon": 8.0, "num_steps": 40, "batch_size": 20, "group_size": 2, **changes}
    data = type("Data", (), {"train": USERS, "metadata": {}})
    return fill_defaults(algorithm, PrivacyConfig(**settings), data)[0], data


def compared(algorithm, *, run=None, **changes):
    run = run_config(data="posts", run_dir=Path("runs"), **(run or {}))
    return compare(algorithm, completed(algorithm, **changes)[0], run, USERS, PARAMETERS)


def kinds(cells):
    """What is sampled, and the groups of correlated noise."""
    return [(c.changes.get("sampling", "poisson"), c.changes.get("bands")) for c in cells]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_training_has_the_noise_that_is_said_of_each(algorithm):
    found, plans = compared(algorithm), []
    for cell, (sampling, bands) in zip(found, kinds(found), strict=True):
        privacy, data = completed(algorithm)
        privacy, _ = fill_defaults(algorithm, dataclasses.replace(privacy, **cell.changes), data)
        method = method_for(algorithm, privacy, USERS, SecretKey.create(seed=1))
        plan = make_plan(algorithm, privacy, USERS, method, PARAMETERS, [], "")
        assert (plan.sampling.kind, plan.noise.bands) == (sampling, bands or 1)
        assert plan.noise_multiplier == cell.noise_multiplier
        plans.append(plan)
    errors = [
        predicted_error(plan.noise_multiplier, plan.num_steps, plan.noise.bands)
        / plan.expected_count
        for plan in plans
    ]
    assert [cell.ratio for cell in found] == pytest.approx([each / errors[0] for each in errors])
    least = min(found, key=lambda cell: cell.ratio)
    assert least.changes["noise"] == "correlated" and least.ratio < 1
    sampled = {sampling for sampling, _ in kinds(found)}
    assert sampled == {"poisson", "cyclic"} | ({"allocation"} if algorithm == "uls" else set())


@pytest.mark.slow
@pytest.mark.ci
def test_correlated_noise_is_not_for_optimizers_that_undo_it():
    found = compared(Algorithm.ULS, run={"optimizer": "adam"})
    assert kinds(found) == [("poisson", None), ("allocation", None)]


def test_rows_of_noise_that_do_not_fit_are_not_chosen(monkeypatch):
    roomy = kinds(compared(Algorithm.ELS))
    monkeypatch.setattr(advice, "_memory", lambda: 8 * PARAMETERS / advice.MEMORY_SHARE)
    tight = kinds(compared(Algorithm.ELS))
    assert {bands for _, bands in tight} <= {None, 2, 3} and len(tight) < len(roomy)


def test_allocation_that_takes_far_more_gradients_is_not_chosen():
    assert ("allocation", None) not in kinds(compared(Algorithm.ULS, num_steps=7))


def test_what_was_asked_for_is_not_chosen_anew():
    assert compared(Algorithm.ULS, sampling="poisson") == []
    assert compared(Algorithm.ULS, noise="correlated") == []
