"""Canaries: orthogonal directions, users like any other, and a task that is otherwise unchanged."""

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import mean_problem
from stores import store_of

from fedsim.clipping import Clip
from fedsim.data.dataset import Dataset
from fedsim.engine.task import Task, WrappedTask
from fedsim.engine.worker import LocalEngine
from fedsim.errors import ConfigError
from fedsim.trust import canaries
from fedsim.trust.canaries import Canaries, CanaryTask, Directions

PARAMS = {"a": jnp.zeros((3, 5)), "b": jnp.zeros(8)}


def vectors(count, params=PARAMS):
    """Each canary's direction, as [canaries, parameters]."""
    grad = jax.grad(Directions(count).along)
    rows = [jax.tree.leaves(grad(params, jnp.int32(i))) for i in range(count)]
    return np.array([np.concatenate([np.ravel(leaf) for leaf in row]) for row in rows])


@pytest.mark.parametrize("count", [1, 4, 23])
def test_directions_are_orthonormal(count):
    found = vectors(count)
    np.testing.assert_allclose(found @ found.T, np.eye(count), atol=1e-6)


def test_scores_are_products_with_the_directions(rng):
    total = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), PARAMS)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)])
    found = Directions(4).scores(total)
    np.testing.assert_allclose(found, vectors(4) @ flat, rtol=1e-5)
    with pytest.raises(ConfigError, match="gradient_canaries=24: expected <= 23"):
        Canaries(np.ones(24, bool), rows=1, clip_norm=1.0).task(None, PARAMS)


def test_only_a_canarys_gradient_is_its_own_and_it_is_clipped(rng):
    _, inner = mean_problem(rng, [1] * 4)
    owners = np.array([-1, 1, -1, 0], np.int32)
    task, plain = CanaryTask(inner, owners, Directions(2), 0.5), LocalEngine(inner, num_lanes=1)
    engine, params = LocalEngine(task, num_lanes=1), jnp.ones(6)
    rows = np.array([[0], [2]])
    for clip in (Clip(0.5), Clip(0.5, normalised=True)):
        same = [each.clipped_sum(params, rows, clip)[0] for each in (engine, plain)]
        np.testing.assert_array_equal(*same)
        for row, canary in ((1, 1), (3, 0)):
            total, stats = engine.clipped_sum(params, np.array([[row]]), clip)
            np.testing.assert_allclose(
                reference.floats(total, clip),
                clip.sensitivity * vectors(2, jnp.zeros(6))[canary],
                atol=2e-5,
            )
            assert stats.norms[0] == pytest.approx(canaries.LENGTH * 0.5, rel=1e-4)


def test_everything_of_a_task_is_forwarded():
    wanted = {name for name in vars(Task) if not name.startswith("_")}
    assert wanted >= {"init", "read", "losses", "nats", "describe", "frozen", "buckets"}
    inner = SimpleNamespace(**{name: object() for name in wanted})
    task = pickle.loads(pickle.dumps(WrappedTask(inner)))
    assert all(getattr(task, name) is getattr(task.inner, name) for name in wanted)


@pytest.mark.parametrize("flagged", [False, True])
def test_those_whose_coin_fell_come_after_the_others(flagged):
    texts = {f"u{u}": [[1 + u, 2, 3]] * (u + 1) for u in range(3)}
    flags = {user: [[False, True, True]] * len(rows) for user, rows in texts.items()}
    store = store_of(texts, 4, 16, flags if flagged else None)
    plant = Canaries(np.array([True, False, True, False]), rows=2, clip_norm=1.0)
    users = plant.data(Dataset(train=store)).train
    assert plant.owners.tolist() == [-1] * 6 + [0, 0, 2, 2]
    assert users.offsets.tolist() == [0, 1, 3, 6, 8, 10]
    assert (users.num_users, users.num_examples, users.is_flagged) == (5, 10, flagged)
    rows = np.array([6, -1, 9, 5])
    tokens, sizes = users.gather(rows, 4)  # a canary's loss needs none, and is replaced
    assert tokens.tolist() == [[1, 2, 3, 0], [0] * 4, [1, 2, 3, 0], [3, 2, 3, 0]]
    assert sizes.tolist() == users.sizes(rows).tolist() == [3, 0, 3, 3]
    trained = users.trained(rows, 4)
    assert (trained is None) != flagged and (not flagged or trained[:, 1].tolist()[1] is False)
    assert users.fingerprint != store.fingerprint and users.user_ids() == store.user_ids()
