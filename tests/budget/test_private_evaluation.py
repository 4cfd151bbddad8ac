"""Losses with noise: a Gaussian mechanism, of losses that each follow from one user's texts."""

import math

import numpy as np
import pytest
from problems import SoftmaxTask

from fedsim import accounting
from fedsim.budget import Entry, open_locked
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.plan import MAX_ROWS
from fedsim.training.private_evaluation import rows_of_users
from fedsim.trust import budget


@pytest.mark.privacy
def test_a_noisy_loss_is_a_gaussian_mechanism():
    most, size, sigma = 5.0, 200, 3.0
    losses = np.random.default_rng(1).uniform(0.2, 1.5, size)  # far from L / 2
    key = SecretKey.create(seed=1)

    def released(values, number):
        how = {"bound": most, "count": size, "stddev": sigma}
        return noisy_mean_loss(values, rng=key.generator("evaluation", number), **how)

    found = np.array([released(losses, number) for number in range(2000)])
    spread = sigma * most / 2 / size
    assert abs(found.mean() - losses.mean()) < 5 * spread / math.sqrt(2000)
    assert abs(found.std() / spread - 1) < 0.1
    # One user moves the mean by L / 2 / N at most, where one without texts adds nothing: L / 2.
    for extreme in (0.0, 1e9, math.nan, math.inf):
        other = losses.copy()
        other[0] = extreme
        moved = released(other, 0) - released(losses[1:], 0)  # who has no text is no loss
        assert abs(moved) <= most / 2 / size * (1 + 1e-5) + 2.0**-8 * spread


@pytest.mark.privacy
def test_a_users_loss_is_their_own(rng):
    """Against a loop; and to the last bit the same whoever is beside them, or has no texts."""
    sizes = [3, 0, 1, 3 * MAX_ROWS, 2]
    features = rng.normal(size=(sum(sizes), 5)).astype(np.float32)
    labels = rng.integers(4, size=sum(sizes))
    theta = rng.normal(size=(5, 4)).astype(np.float32)

    def found(users):
        ends = np.concatenate([[0], np.cumsum(sizes)])
        kept = np.concatenate([np.arange(ends[u], ends[u + 1]) for u in users])
        task = SoftmaxTask(features[kept], labels[kept], 4)
        offsets = np.concatenate([[0], np.cumsum([sizes[u] for u in users])])
        rows = rows_of_users(offsets, len(users), MAX_ROWS)
        return task, LocalEngine(task, num_lanes=1).group_losses(theta, "eval_users", rows)

    task, everybody = found(range(5))
    assert len(everybody) == 4
    losses = np.asarray(task.losses(theta, task.read("eval_users", np.arange(sum(sizes)))))
    few = np.linspace(4, 4 + 3 * MAX_ROWS - 1, MAX_ROWS).astype(int)
    expected = [losses[:3].mean(), losses[3], losses[few].mean(), losses[-2:].mean()]
    assert everybody == pytest.approx(expected, rel=1e-5)
    assert found([0, 2, 3, 4])[1].tolist() == everybody.tolist()
    assert found([3, 4])[1].tolist() == everybody[2:].tolist()
    assert found([2, 0])[1].tolist() == everybody[[1, 0]].tolist()


@pytest.mark.privacy
@pytest.mark.parametrize("outcome", ["released", ""])
def test_evaluations_that_earlier_versions_made_after_a_training_are_counted(tmp_path, outcome):
    """Also one that was killed."""
    planned, delta = [(accounting.StepEvent(3.0, 1.0), 1)], 1e-6
    run = str(tmp_path / "run" / "evaluations" / "0a1b2c3d")
    with open_locked(tmp_path / "ledger") as ledger:
        users = ledger.save_users(ledger.users(["amy", "bob"]))
        ledger.begin(Entry(0, "one", "evaluation", run, users, "", planned, (0.0, 0.0)))
        if outcome:
            ledger.end("one", planned, outcome)
    found = budget(tmp_path / "ledger", ["bob", "cat"], delta=delta)
    assert found["epsilon"] == pytest.approx(accounting.epsilon(planned, delta), rel=1e-6)
    assert [run["kind"] for run in found["runs"]] == ["evaluation"]
    assert budget(tmp_path / "ledger", ["cat"], delta=delta)["epsilon"] == 0
