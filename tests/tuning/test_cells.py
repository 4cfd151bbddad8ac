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
DATA = type("Data", (), {"train": USERS, "metadata": {}})


def completed(algorithm, **changes):
    settings = {"epsilon": 8.0, "num_steps": 40, "batch_size": 20, "group_size": 2, **changes}
    return fill_defaults(algorithm, PrivacyConfig(**settings), DATA)[0]


def compared(algorithm, *, run=None, **changes):
    run = run_config(data="posts", run_dir=Path("runs"), **(run or {}))
    return compare(algorithm, completed(algorithm, **changes), run, USERS, PARAMETERS)


def kinds(cells):
    """What is sampled, and the groups of correlated noise."""
    return [(c.changes.get("sampling", "poisson"), c.changes.get("bands")) for c in cells]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_training_has_the_noise_that_is_said_of_each(algorithm):
    found, errors = compared(algorithm), []
    for cell, (sampling, bands) in zip(found, kinds(found), strict=True):
        privacy = dataclasses.replace(completed(algorithm), **cell.changes)
        privacy, _ = fill_defaults(algorithm, privacy, DATA)
        method = method_for(algorithm, privacy, USERS, SecretKey.create(seed=1))
        plan = make_plan(algorithm, privacy, USERS, method, PARAMETERS, [], "")
        assert (plan.sampling.kind, plan.noise.bands) == (sampling, bands or 1)
        assert plan.noise_multiplier == cell.noise_multiplier
        error = predicted_error(plan.noise_multiplier, plan.num_steps, plan.noise.bands)
        errors.append(error / plan.expected_count)
    assert [cell.ratio for cell in found] == pytest.approx([each / errors[0] for each in errors])
    least = min(found, key=lambda cell: cell.ratio)
    assert least.changes["noise"] == "correlated" and least.ratio < 1
    sampled = {sampling for sampling, _ in kinds(found)}
    assert sampled == {"poisson", "cyclic"} | ({"allocation"} if algorithm == "uls" else set())


def test_what_does_not_fit_is_not_chosen(monkeypatch):
    adam = kinds(compared(Algorithm.ULS, run={"optimizer": "adam"}))
    assert adam == [("poisson", None), ("allocation", None)]  # it undoes correlated noise
    many_gradients = kinds(compared(Algorithm.ULS, num_steps=7))
    assert ("allocation", None) not in many_gradients
    roomy = kinds(compared(Algorithm.ELS))
    monkeypatch.setattr(advice, "_memory", lambda: 8 * PARAMETERS / advice.MEMORY_SHARE)
    tight = kinds(compared(Algorithm.ELS))
    assert {bands for _, bands in tight} <= {None, 2, 3} and len(tight) < len(roomy)
    for asked in ({"sampling": "poisson"}, {"noise": "correlated"}):  # is not chosen anew
        assert compared(Algorithm.ULS, **asked) == []
