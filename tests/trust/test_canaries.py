"""Canaries: orthogonal directions, users like any other, and a task that is otherwise unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
from learnt import learnt
from problems import mean_problem

from fedsim.clipping import Clip
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.data.tokenizer import Tokenizer
from fedsim.data.users import UserStore
from fedsim.engine.task import Task, WrappedTask
from fedsim.engine.worker import LocalEngine
from fedsim.errors import ConfigError
from fedsim.trust import canaries
from fedsim.trust.canaries import Canaries, CanaryTask, Directions, StoreWithCanaries, canary_tokens

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
        Directions(24).scores(total)


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
    assert wanted <= vars(WrappedTask).keys()  # none is left at the protocol's default


def test_a_task_without_drawn_canaries_has_the_sums_of_the_inner_task(rng):
    users, inner = mean_problem(rng, [4] * 6)
    task = CanaryTask(inner, np.full(24, -1, np.int32), Directions(2), 0.5)
    rows, params, clip = np.arange(24).reshape(6, 4), jnp.ones(6), Clip(0.5)
    plain, planted = (
        LocalEngine(each, num_lanes=2).clipped_sum(params, rows, clip)[0] for each in (inner, task)
    )
    assert np.abs(plain).max() > 0
    np.testing.assert_array_equal(planted, plain)


def stores():
    first = {f"u{u}": [[1 + u, 2, 3]] * (u + 1) for u in range(3)}
    second = {"x": [[7, 8]], "y": [[9], [5, 6, 7]]}
    return (UserStore.from_examples(users, 4, 16) for users in (first, second))


def test_planted_users_come_after_the_others():
    store, planted = stores()
    both = StoreWithCanaries(store, planted)
    assert both.offsets.tolist() == [0, 1, 3, 6, 7, 9]
    assert (both.num_users, both.num_examples) == (5, 9)
    assert both.lengths.tolist() == [3] * 6 + [2, 1, 3]
    tokens, sizes = both.gather(np.array([6, -1, 0, 5]), 4)
    assert tokens.tolist() == [[7, 8, 0, 0], [0] * 4, [1, 2, 3, 0], [3, 2, 3, 0]]
    assert sizes.tolist() == [2, 0, 3, 3]
    assert both.fingerprint not in (store.fingerprint, planted.fingerprint)


def test_those_whose_coin_fell_are_in_the_data_and_no_others():
    store, _ = stores()
    rng = np.random.default_rng(0)
    included = np.array([True, False, True, False, True])
    plant = Canaries(3, 2, rows=2, clip_norm=1.0, included=included, rng=rng)
    data = plant.data(Dataset(train=store))
    assert data.train.num_users == 3 + 3 and data.train.num_examples == 6 + 6
    assert plant.owners.tolist() == [-1] * 6 + [0, 0, 2, 2, -1, -1]
    texts, _ = plant.texts.gather(np.arange(2), 4)
    own, _ = data.train.gather(np.array([10, 11]), 4)
    np.testing.assert_array_equal(own, [texts[1], texts[1]])  # the second text canary
    assert plant.text_included.tolist() == [False, True]


@pytest.mark.parametrize("spec", ["bytes", "wordpiece", "bpe"])
def test_a_text_canary_is_a_text_of_any_tokenizer(spec, tmp_path):
    """Nobody's words, no special token but the first, and again the same tokens."""
    said = "The 95 quick brown foxes, 13 of 2,468,070, jump over a lazy dog's vexing work. "
    texts = pa.table({"user_id": [f"u{i}" for i in range(30)], "text": [said * 3] * 30})
    pq.write_table(texts, tmp_path / "texts.parquet")
    if spec != "bytes":
        spec = learnt(spec, [said] * 9, 400, tmp_path / "learnt.json")
    data = build(
        tmp_path / "texts.parquet", tmp_path / "data", tokenizer=spec, max_length=40, eval_users=0.0
    )
    found = canary_tokens(data, 30, np.random.default_rng(0))
    tokenizer = Tokenizer.load(tmp_path / "data" / "tokenizer.json")
    assert len({tuple(ids) for ids in found}) == 30 and {len(ids) for ids in found} == {32}
    for ids in found:
        assert ids[0] == tokenizer.begin_id and tokenizer.end_id not in ids[1:]
        text = tokenizer.decode(ids[1:])
        assert tokenizer.encode_batch([text])[0][:20] == ids[1:21]
        assert not set(text.split()) & set(said.lower().split()) and "[UNK]" not in text
