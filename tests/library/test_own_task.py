"""A model of one's own: trained by both algorithms, and every user's rows stay their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import linen as nn
from refused import refuses

import fedsim
from fedsim.clipping import Clip
from fedsim.engine.worker import LocalEngine
from fedsim.errors import FileDamaged
from fedsim.library.own_task import OwnedRows, OwnedTask, owner_ids, warn_of_coupled_rows

SETTINGS = {"epsilon": 8, "num_steps": 6, "batch_size": 40, "optimizer": "momentum", "seed": 1}
SETTINGS |= {"learning_rate": 0.5, "strategy": "scan", "rows_per_pass": 2, "delta": 1e-3}
ROWS = 240


class Classifier(fedsim.Task):
    """Softmax regression on numbers."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def init(self, key):
        return {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}

    def read(self, split, rows):
        return {"x": self.x[split][rows], "y": self.y[split][rows]}

    def losses(self, params, batch):
        logits = batch["x"] @ params["w"] + params["b"][None]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]


@pytest.fixture
def task():
    rng = np.random.default_rng(0)
    truth, splits = 2 * rng.normal(size=(4, 3)), ("train", "eval_users")
    x = {split: rng.normal(size=(ROWS, 4)).astype(np.float32) for split in splits}
    return Classifier(x, {split: (x[split] @ truth).argmax(1).astype(np.int32) for split in splits})


@pytest.fixture
def owners(rng):
    return {"train": rng.permutation(ROWS) % 30, "eval_users": 30 + np.arange(ROWS) % 10}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, group", [("els", 5), ("uls", 4)])
def test_it_learns_and_its_claim_is_verified(algorithm, group, task, owners, run_dir):
    settings = {**SETTINGS, "group_size": group, "engine": "local", "num_steps": 20}
    run = fedsim.train(algorithm, owners, task=task, run_dir=run_dir, **settings)
    assert 7.9 < run.epsilon <= 8
    assert run.eval_loss < run.summary["initial_eval_loss"] == pytest.approx(np.log(3), rel=1e-5)
    found = {check.promise: check.holds for check in run.verify()}
    assert found["ledger"] and found["epsilon"] and found["summary"] and found["data"] is None
    assert run.summary["num_users"] == 30
    assert [fact["fact"] for fact in run.summary["outside"]] == ["known-seed", "own-task"]
    with refuses(f"run_dir={run_dir}", says="a language model"):
        run.generate("x")


def test_a_loss_that_couples_rows_is_warned_of(task):
    class Centred(Classifier):
        def losses(self, params, batch):
            losses = super().losses(params, batch)
            return losses - losses.mean()

    params, order = task.init(None), np.arange(ROWS)
    warn_of_coupled_rows(task, params, order)
    with pytest.warns(UserWarning, match="task=Centred: the loss of a row depends on the rows"):
        warn_of_coupled_rows(Centred(task.x, task.y), params, order)


def test_it_goes_on_where_it_stopped_and_not_with_other_rows(task, owners, tmp_path):
    def train(run_dir, **changed):
        settings = {**SETTINGS, "engine": "local", "group_size": 4, "num_steps": 3, **changed}
        return fedsim.train("uls", owners, task=task, run_dir=tmp_path / run_dir, **settings)

    done = train("a")
    assert train("a", resume=True).summary == done.summary
    task.x["train"][0] += 1
    with refuses("data", says="the data with which"):
        train("a", resume=True)


def test_rows_are_sorted_by_owner_and_found_again(task):
    names = np.array(["b", "a", "c", "a"])
    rows = OwnedRows(task, "train", names)
    assert rows.num_users == 3 and rows.offsets.tolist() == [0, 2, 3, 4]
    assert names[rows.order].tolist() == ["a", "a", "b", "c"]
    read = OwnedTask(task, {"train": rows.order}).read("train", np.arange(4))
    np.testing.assert_array_equal(read["x"], task.x["train"][[1, 3, 0, 2]])
    rows.check()
    task.sizes = lambda split, rows: 10 + rows
    sizes = OwnedTask(task, {"train": rows.order}).sizes("train", np.array([0, -1, 2]))
    np.testing.assert_array_equal(sizes, [11, 0, 10])
    task.x["train"][3] = 0
    with pytest.raises(FileDamaged, match="rows of train have changed"):
        rows.check()


@pytest.mark.privacy
def test_an_owner_is_the_same_one_whatever_column_it_comes_from(task):
    """Who is two users to the ledger of the data has twice the limit."""
    for owners in ([7, 7, 8], np.array([7, 7, 8], np.uint8), [" 7", "7.0", "8"]):
        assert OwnedRows(task, "train", owner_ids("train", owners)).user_ids() == ["7", "8"]
    many = np.array([2**64 - 1, 2**63], np.uint64)
    store = OwnedRows(task, "train", owner_ids("train", many))
    assert store.user_ids() == [str(2**63), str(2**64 - 1)]


@pytest.mark.parametrize("strategy", ["scan:2", "direct:16"])
def test_a_users_rows_reach_no_one_elses_unit_through_padding(task, strategy):
    """Padding that read somebody's row would spoil all units with it where that row is nan."""
    owners = np.repeat(np.arange(8), ROWS // 8)
    store = OwnedRows(task, "train", owners)
    rows = np.full((7, 4), -1)
    rows[:, 0] = store.offsets[1:8]
    params = jax.tree.map(np.asarray, task.init(jax.random.key(0)))
    sums = []
    for value in (0, np.nan):
        task.x["train"][[0, -1]] = value  # of users who take no part; -1 is the last row
        engine = LocalEngine(OwnedTask(task, {"train": store.order}), num_lanes=2)
        found = engine.clipped_sum(
            params, rows, Clip(1.0), fedsim.clipping.Strategy.parse(strategy)
        )
        assert not found[1].dropped.any()
        sums.append(found[0])
    jax.tree.map(np.testing.assert_array_equal, *sums)


@pytest.mark.parametrize(
    "owners, what",
    [
        ({"eval_users": [1, 2]}, "data=eval_users"),
        ({"train": [1], "dev": [1]}, "data=train, dev"),
        (np.array([[1, 2], [3, 4]]), "data=train"),
        ([], "data=train with owners of type null"),
        ([1.0, 2.0], "data=train with owners of type double"),
        ([2**70, 1], "data=train"),
        ([7, "7"], "data=train"),
        (["a", "NA"], "data=train with 1 rows without owner"),
        (pd.array(["a", None], "string"), "data=train with 1 rows without owner"),
        ({"train": [7, 8], "eval_users": ["9", "7"]}, "data=eval_users with the owner 7"),
    ],
)
def test_owners_that_are_none_are_named(owners, what, task, run_dir):
    with refuses(what):
        fedsim.train("uls", owners, task=task, run_dir=run_dir, engine="local", **SETTINGS)
    assert not run_dir.exists()


class Lookups(Classifier):
    """Looks up the rows' labels in a table of three."""

    def init(self, key):
        return nn.Embed(3, 3).init(key, jnp.zeros((1, 1), int))["params"]

    def losses(self, params, batch):
        return nn.Embed(3, 3).apply({"params": params}, batch["y"]).sum(axis=-1)


@pytest.mark.privacy
@pytest.mark.parametrize("wrong", [3, -1, -4])
@pytest.mark.parametrize("strategy", ["scan", "direct", "ghost"])
def test_an_id_that_is_in_no_table_is_refused_before_anything_is_computed(
    wrong, strategy, task, owners, run_dir, monkeypatch
):
    monkeypatch.setattr("fedsim.engine.worker.LocalEngine", None)
    own = Lookups(task.x, task.y)
    own.y["train"][17] = wrong
    with refuses("data=train with an unknown id", says="below num_embeddings"):
        settings = {**SETTINGS, "strategy": strategy, "engine": "local", "group_size": 4}
        fedsim.train("uls", owners, task=own, run_dir=run_dir, **settings)
    assert not run_dir.exists()


@pytest.mark.parametrize("name", ["user", "model", "max_length", "tokenizer"])
def test_settings_of_texts_are_refused_beside_a_task(name, task, owners, run_dir):
    with refuses(f"{name}=9", says="nothing beside task"):
        fedsim.train("uls", owners, task=task, run_dir=run_dir, **SETTINGS, **{name: 9})
    with refuses("task=dict"):
        fedsim.train("uls", owners, task={}, run_dir=run_dir, **SETTINGS)


def test_parameters_are_numbers(task, owners, run_dir):
    task.init = lambda key: {"w": np.zeros((4, 3), int), "b": np.zeros(3)}
    with refuses("task=init() with int64"):
        settings = {**SETTINGS, "engine": "local", "group_size": 4}
        fedsim.train("uls", owners, task=task, run_dir=run_dir, **settings)
