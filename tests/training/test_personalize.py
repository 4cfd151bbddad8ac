"""Personalization: halves that share nothing, SGD as it is defined, and the command."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from problems import mean_problem, users_of_sizes
from refused import refuses
from test_masked import task_of, with_other_ends
from test_train import command, texts  # noqa: F401

from fedsim.cli.main import main
from fedsim.config import Personalization
from fedsim.data import Owners
from fedsim.run.console import Console
from fedsim.training.personalize import Personalizer, halves, personalize, personalize_run

SIZES = [1, 2, 9, 40, 3, 1, 16]


def test_halves_share_nothing_and_users_with_one_example_have_none(key):
    users = users_of_sizes(SIZES)
    found = halves(users, Personalization(max_examples=12), key)
    assert [half.user for half in found] == [1, 2, 3, 4, 6]
    for half in found:
        start, end = users.offsets[half.user : half.user + 2]
        rows = np.concatenate([half.own, half.reserved])
        assert len(set(rows)) == len(rows) and start <= rows.min() and rows.max() < end
        assert len(half.own) == min((end - start) // 2, 12)
        assert len(half.reserved) == min(-(-(end - start) // 2), 12)


def test_users_are_drawn_and_the_same_for_every_model(key):
    users = users_of_sizes([5] * 50)
    first, second = (halves(users, Personalization(users=8), key) for _ in range(2))
    assert len({half.user for half in first}) == 8
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.own, b.own)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_whole_halves_at_a_time_it_is_gradient_descent(rate, rng, key):
    users, task = mean_problem(rng, [20, 11])
    settings = Personalization(num_epochs=3, batch_size=16)  # padded: 10 and 5 rows are real
    theta = np.linspace(0, 1, 6).astype(np.float32)
    personalizer = Personalizer(task, theta, "train", settings)
    for half in halves(users, settings, key):
        mean = task.points[half.own].mean(axis=0)
        expected = mean + (1 - rate) ** 3 * (theta - mean)
        found = personalizer.personal(half, rate, key)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        loss = 0.5 * np.square(theta - task.points[half.reserved]).sum(axis=1).mean()
        assert personalizer.before(half) == pytest.approx(loss, rel=1e-5)


def test_every_example_is_seen_once_in_an_epoch(rng, key):
    users, task = mean_problem(rng, [30])
    personalizer = Personalizer(task, np.zeros(6), "train", Personalization(batch_size=4))
    (half,) = halves(users, Personalization(), key)
    batches = list(personalizer._batches(half, key))
    assert len(batches) == 4 * 4 and all(len(rows) == 4 for rows in batches)
    epochs = np.reshape(batches, (4, 16))
    for rows in epochs:
        assert sorted(rows[rows >= 0]) == sorted(half.own)
    assert not np.array_equal(epochs[0], epochs[1])


def test_the_best_learning_rate_counts(rng):
    users, task = mean_problem(rng, [12] * 10)
    task.points += np.repeat(3 * rng.normal(size=(10, 6)), 12, axis=0).astype(np.float32)
    settings = Personalization(learning_rates=(1e-6, 0.1, 1e30))
    found = personalize(task, np.zeros(6), users, "train", settings, Console())
    assert found["learning_rate"] == 0.1 and found["num_users"] == 10
    assert found["personalized_loss"] == pytest.approx(found["loss"] - found["gain"])
    assert found["gain"] > 5 * found["gain_error"] > 0
    assert [row["learning_rate"] for row in found["rates"]] == [1e-6, 0.1, 1e30]


@pytest.mark.slow
@pytest.mark.ci
def test_of_chats_the_trained_tokens_count_alone(key):
    task, params = task_of()
    other, changed = with_other_ends(task)
    settings = Personalization(num_epochs=2, batch_size=4)
    assert changed > 10
    for half in halves(task.dataset.train, settings, key):
        one, two = (Personalizer(t, params, "train", settings) for t in (task, other))
        batch = task.read("train", half.reserved)
        nats, predictions = (np.asarray(each) for each in jax.jit(task.nats)(params, batch))
        assert 0 < predictions.sum() < np.maximum(batch["sizes"] - 1, 0).sum()
        assert one.before(half) == pytest.approx(nats.sum() / predictions.sum(), rel=1e-5)
        assert two.before(half) == pytest.approx(one.before(half), rel=1e-5)
        personal = [each.personal(half, 0.5, key) for each in (one, two)]
        equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(equal, *personal)
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), personal[0], params)
        assert max(jax.tree.leaves(moved)) > 0.01


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_personalized_from_the_command_line(texts, run_dir, capsys):  # noqa: F811
    main(command(texts, run_dir, **{"num-steps": 2}))
    options = ["--users", "2", "--num-epochs", "1", "--learning-rates", "0.01", "0.1", "--json"]
    main(["personalize", str(run_dir), *options])
    found = json.loads(capsys.readouterr().out)
    assert found["num_users"] == 2 and found["split"] == "eval_users"
    assert len(found["rates"]) == 2 and found["loss"] > 0
    with pytest.raises(SystemExit) as stopped:
        main(["personalize", str(run_dir), "--split", "test"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == (
        "fedsim: error: split=test: expected data with test, found train, eval_users, eval_examples"
    )


def test_users_whose_texts_others_own_too_are_not_halved(monkeypatch):
    """A range of such a store is of a set of owners: nobody's texts are one range."""
    starts, users = np.array([0, 2, 3]), np.array([0, 1, 0], np.int32)
    store = SimpleNamespace(owners=Owners(2, starts, users), num_users=2)
    data = SimpleNamespace(eval_users=store)
    found = None, None, data, Path("checkpoint")
    monkeypatch.setattr("fedsim.training.personalize.last_model", lambda *_: found)
    run = SimpleNamespace(data=SimpleNamespace(source="mail"), run_dir="r")
    with refuses("data", says="one owner each"):
        personalize_run(None, run, None)


@pytest.mark.parametrize("fields", [{"num_epochs": 0}, {"learning_rates": ()}, {"users": 0}])
def test_what_makes_no_sense_is_refused(fields):
    (name,) = fields
    with refuses(name):
        Personalization(**fields)
