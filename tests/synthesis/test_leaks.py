"""The search for training users' texts: alarms on copies, silent on what held-out users wrote."""

import numpy as np
import pytest

from fedsim.data import Dataset, UserStore
from fedsim.errors import ConfigError
from fedsim.synthesis import search
from fedsim.synthesis.leaks import difference_of_shares, noticed, permutation_test, runs_of

WIDTH, VOCAB = 40, 300


def written(rng, users, texts=4, common=None):
    """Texts of users, a list of token ids each; `common` begins all of them."""
    own = rng.integers(1, VOCAB, (users, texts, WIDTH))
    if common is not None:
        own[:, :, : len(common)] = common
    return {f"{i:05d}": rows for i, rows in enumerate(own.tolist())}


def stored(rows):
    return UserStore.from_examples(rows, WIDTH, VOCAB)


def synthetic_of(rows):
    return stored({f"{i:05d}": [row] for i, row in enumerate(rows)})


@pytest.fixture(scope="module")
def users():
    rng = np.random.default_rng(1)  # other texts than those of the tests
    common = rng.integers(1, VOCAB, 15)
    return written(rng, 200, common=common), written(rng, 80, common=common)


def found(synthetic, users, **options):
    train, held_out = users
    data = Dataset(train=stored(train), eval_users=stored(held_out))
    return search(synthetic_of(synthetic), data, **options)


def mixed(rng, rows, share):
    """Texts of which a part is copied from rows of users, from the 12th token on."""
    texts = rng.integers(1, VOCAB, (400, WIDTH))
    for text, user in zip(texts, list(rows.values())[: round(share * len(rows))], strict=False):
        text[12:] = user[0][12:]
    return texts.tolist()


def test_it_alarms_on_copies_of_training_users_alone(rng, users):
    copied = found(mixed(rng, users[0], 0.3), users)
    assert copied["alarm"] and copied["non_private"]
    for row in copied["users"]:
        assert row["users"] == [200, 80] and row["users_found"] == [60, 0]
        assert row["low"] > 0.15 and row["low"] < 0.3 < row["high"]
        assert row["users_compared"] == 80
        # 60 of 400 texts have runs of 60 of 200 users; of 80 of them, 24 in the mean.
        assert row["texts_found"][0] == pytest.approx(24 / 400, rel=0.3)
        assert row["texts_found"][1] == 0
    assert not found(mixed(rng, users[1], 0.3), users)["alarm"]
    assert not found(rng.integers(1, VOCAB, (400, WIDTH)).tolist(), users)["alarm"]
    short = found([[1, 2, 3]] * 3, users)  # no text has a run of that length
    assert not short["alarm"] and short["users"][0]["texts_found"] == [0, 0]


def test_runs_of_several_users_tell_of_none(users):
    greeting = users[0]["00000"][0][:15]
    result = found([greeting * 2] * 50, users, lengths=(10,))
    assert result["users"][0]["users_found"] == [0, 0] and not result["alarm"]


def test_texts_that_were_held_back_of_training_users_are_left_out_of_the_control(users):
    train, held_out = users
    first = {user: rows[:1] for user, rows in train.items()}
    later = {user: rows[1:] for user, rows in train.items()}
    openings = [rows[0] for rows in held_out.values()]
    data = Dataset(train=stored(later), eval_users=stored(held_out), eval_examples=stored(first))
    (row,) = search(synthetic_of(openings), data, lengths=(20,))["users"]
    assert row["users_found"] == [0, 0]


def test_without_a_leak_the_test_and_the_interval_keep_their_levels():
    """Users of one distribution, with few of whom anything is shared, and some much."""
    rng, trials = np.random.default_rng(3), 300
    alarms = covered = 0
    for _ in range(trials):
        scores = np.where(rng.random(160) < 0.2, rng.exponential(size=160), 0)
        inside, outside = scores[:110], scores[110:]
        alarms += permutation_test(inside, outside, rng, count=199) <= 0.05
        hits = [int(np.count_nonzero(each)) for each in (inside, outside)]
        low, high = difference_of_shares(hits, [110, 50])
        covered += low <= 0 <= high
    assert alarms <= 0.05 * trials + 3 * np.sqrt(0.05 * 0.95 * trials)
    assert alarms > 0  # it can be wrong, or it would not have that level
    assert covered >= 0.95 * trials


def test_a_p_value_is_that_of_all_permutations(rng):
    inside, outside = np.array([3.0, 2.0, 0.0]), np.array([0.0, 0.0, 1.0])
    # Of the 20 ways to choose three users of six, four have a sum of at most 1.
    assert permutation_test(inside, outside, rng, 20_000) == pytest.approx(4 / 20, abs=0.01)
    assert permutation_test(np.zeros(4), np.zeros(3), rng) == 1.0


def test_what_is_noticed_is_what_the_test_alarms_on(rng):
    for sizes, level in (((100, 60), 0.01), ((300, 20), 0.005)):
        share = noticed(sizes, level)
        for change, alarms in ((1.15, True), (0.8, False)):
            inside = (np.arange(sizes[0]) < round(change * share * sizes[0])).astype(float)
            assert (permutation_test(inside, np.zeros(sizes[1]), rng) <= level) == alarms
    assert noticed((1000, 1), 0.0005) is None  # nobody can be told from one user


def test_runs_are_those_within_a_row(rng):
    tokens = rng.integers(0, 5, (30, 12)).astype(np.int32)
    sizes = rng.integers(0, 13, 30)
    hashes, rows = runs_of(tokens, sizes, 3)
    texts = [tuple(tokens[r, i : i + 3]) for r in range(30) for i in range(sizes[r] - 2)]
    assert rows.tolist() == [r for r in range(30) for _ in range(max(0, sizes[r] - 2))]
    assert (
        len(set(texts))
        == len(set(hashes.tolist()))
        == len({*zip(texts, hashes.tolist(), strict=True)})
    )
    assert len(runs_of(tokens, sizes, 13)[0]) == 0


@pytest.mark.parametrize(
    ("changes", "field"), [({"lengths": (1,)}, "lengths"), ({"level": 0.0}, "level")]
)
def test_a_search_out_of_range_is_refused(users, changes, field):
    with pytest.raises(ConfigError) as error:
        found([[1] * WIDTH], users, **changes)
    assert error.value.field == field
    with pytest.raises(ConfigError, match="held-out users"):
        search(synthetic_of([[1] * WIDTH]), Dataset(train=stored(users[0])))
