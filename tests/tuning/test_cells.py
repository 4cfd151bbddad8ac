"""Ways of sampling and kinds of noise: what `recommend` says of them is what training does."""

import dataclasses
from pathlib import Path

import pytest
from problems import users_of_sizes

from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.keys import SecretKey
from fedsim.plan import fill_defaults, make_plan, method_for
from fedsim.tuning import advice
from fedsim.tuning.advice import compare, least_noisy

USERS, PARAMETERS = users_of_sizes([3] * 400), 5000


def completed(algorithm, **changes):
    """(settings, data)"""
    settings = {"epsilon": 8.0, "num_steps": 40, "batch_size": 20, "group_size": 2, **changes}
    data = type("Data", (), {"train": USERS, "metadata": {}})
    return fill_defaults(algorithm, PrivacyConfig(**settings), data)[0], data


def compared(algorithm, *, run=None, **changes):
    run = run_config(data="posts", run_dir=Path("runs"), **(run or {}))
    return compare(algorithm, completed(algorithm, **changes)[0], run, USERS, PARAMETERS)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_training_has_the_noise_that_is_said_of_each(algorithm):
    found, plans = compared(algorithm), []
    for cell in found:
        privacy, data = completed(algorithm)
        privacy, _ = fill_defaults(algorithm, dataclasses.replace(privacy, **cell.changes), data)
        method = method_for(algorithm, privacy, USERS, SecretKey.create(seed=1))
        plan = make_plan(algorithm, privacy, USERS, method, PARAMETERS, [], "")
        assert (plan.sampling.kind, plan.noise.kind) == (cell.sampling, cell.noise)
        assert plan.noise_multiplier == cell.noise_multiplier and plan.budget == cell.batch_size
        per_number = plan.strategy.bytes_per_number if plan.strategy else 0
        assert cell.row_bytes == per_number * PARAMETERS
        plans.append(plan)
    errors = [plan.predicted_error / plan.expected_count for plan in plans]
    ratios = [error / errors[0] for error in errors]
    assert [cell.ratio for cell in found] == pytest.approx(ratios)
    assert least_noisy(found).noise == "correlated" and least_noisy(found).ratio == pytest.approx(
        min(ratios)
    )
    kinds = {cell.sampling for cell in found}
    assert kinds == {"poisson", "cyclic"} | ({"allocation"} if algorithm == "uls" else set())


@pytest.mark.slow
@pytest.mark.ci
def test_correlated_noise_is_not_for_optimizers_that_undo_it():
    for run in ({"optimizer": "adam"}, {"optimizer": "adafactor"}):
        found = compared(Algorithm.ULS, run=run)
        assert least_noisy(found).sampling == "allocation"
        assert all("not add" in cell.against for cell in found if cell.noise == "correlated")
    assert least_noisy(compared(Algorithm.ULS, run={"optimizer": "sgd"})).noise == "correlated"


def test_rows_of_noise_that_do_not_fit_are_not_chosen(monkeypatch):
    roomy = least_noisy(compared(Algorithm.ELS))
    monkeypatch.setattr(advice, "_memory", lambda: 8 * PARAMETERS / advice.MEMORY_SHARE)
    tight = compared(Algorithm.ELS)
    assert least_noisy(tight).bands in (2, 3) and least_noisy(tight).bands < roomy.bands
    assert any("too much memory" in cell.against for cell in tight)


def test_allocation_that_takes_far_more_gradients_is_not_chosen():
    found = compared(Algorithm.ULS, num_steps=7)  # in one step, or in all
    allocation = next(cell for cell in found if cell.sampling == "allocation")
    assert (allocation.batch_size > 22) == bool(allocation.against)
    assert allocation.participations in (1, 7)


def test_what_was_asked_for_is_not_chosen_anew():
    assert compared(Algorithm.ULS, sampling="poisson") == []
    assert compared(Algorithm.ULS, noise="correlated") == []
