"""How good a set is: texts like held-out users' score best, equal distributions are not apart."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from refused import refuses

from fedsim.budget import hold
from fedsim.cli.main import main
from fedsim.config import changed_run
from fedsim.data import Dataset, Tokenizer, UserStore, build, corpora
from fedsim.data.support_chats import support_chats
from fedsim.errors import ConfigError
from fedsim.models import LanguageModelTask, preset
from fedsim.run import directory
from fedsim.synthesis import Student, measure, store_of, text_of
from fedsim.synthesis.quality import (
    TEXTS_OF_USER,
    curve_of_texts,
    distances,
    divergence_curve,
    features,
    grams,
    jensen_shannon,
    loss_of,
    total_variation,
    user_weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.ci]

WORDS = "the printer works again after reply ticket was closed and opened by user today".split()


def say(rng, count, words=WORDS):
    return [" ".join(rng.choice(words, rng.integers(4, 9))) for _ in range(count)]


def dataset(tmp_path, users, **splits):
    """Data in bytes, with the tokenizer's file. Args: users: texts by user of each split."""
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "tokenizer.json")
    made = {}
    for split, texts in {"train": users, **splits}.items():
        framed = {
            user: [[tokenizer.begin_id, *ids, tokenizer.end_id][:48] for ids in each]
            for user, each in ((user, tokenizer.encode_batch(own)) for user, own in texts.items())
        }
        made[split] = UserStore.from_examples(framed, 48, tokenizer.vocab_size)
    return Dataset(**made, tokenizer_path=tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path, rng):
    def users(count):
        return {f"{i:03d}": say(rng, rng.integers(1, 6)) for i in range(count)}

    return dataset(tmp_path, users(40), eval_users=users(60))


def test_a_loss_is_the_mean_over_held_out_users(data):
    """Against a loop over users; and of the first tokens alone, as of texts that end there."""
    config = preset("micro", data.train.vocab_size, 48)
    task = LanguageModelTask(data, config)
    params = jax.tree.map(lambda leaf: 3 * leaf, task.init(jax.random.key(0)))
    held_out, losses = data.eval_users, []
    for most in (48, 7):
        losses.append([])
        for low, high in zip(held_out.offsets[:-1], held_out.offsets[1:], strict=True):
            rows = np.linspace(low, high - 1, min(high - low, TEXTS_OF_USER)).astype(int)
            tokens, sizes = held_out.gather(rows, 48)
            batch = {"tokens": tokens, "sizes": np.minimum(sizes, most).astype(np.int32)}
            nats, count = task.nats(params, batch)
            losses[-1].append(float(nats.sum()) / int(count.sum()))
    assert loss_of(task, params) == pytest.approx(np.mean(losses[0]), rel=1e-5)
    assert loss_of(task, params, 7) == pytest.approx(np.mean(losses[1]), rel=1e-5)
    assert np.mean(losses[0]) != pytest.approx(np.mean(losses[1]), rel=1e-4)


def test_texts_are_framed_as_the_data_are(data):
    texts = ["a ticket", "b" * 100]
    store = store_of([{"text": text} for text in texts], data)
    tokenizer = Tokenizer.bytes()
    tokens, sizes = store.gather(np.arange(2), 48)
    assert tokens[0, : sizes[0]].tolist() == [
        tokenizer.begin_id,
        *b"a ticket",
        tokenizer.end_id,
    ]
    assert sizes[1] == 48 and tokenizer.end_id not in tokens[1, 1:]


def test_chats_are_rendered_as_the_data_are():
    data = corpora.load("support-chats")
    held_out = data.eval_users
    name = held_out.user_ids()[0]
    chats = [row for row in support_chats() if row["user_id"] == name]
    refused = {"messages": [{"role": "nobody", "content": "?"}]}
    store = store_of([*chats, refused], data)
    rows = np.arange(len(chats))
    assert store.num_examples == len(chats) == held_out.offsets[1]
    for one, other in ((store.gather, held_out.gather), (store.trained, held_out.trained)):
        np.testing.assert_equal(one(rows, 384), other(rows, 384))


def test_completions_are_framed_as_the_data_are(tmp_path):
    plain = [{"user_id": "a", "text": "they purr"}]
    pairs = [{"user_id": "a", "prompt": "say", "completion": "hi"}]
    for name, rows, text in (("plain", plain, "text"), ("pairs", pairs, "completion")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = {"prompt_column": "prompt", "completion_column": "completion"}
        options = {"tokenizer": "bytes", "max_length": 48, "eval_users": 0.0}
        options |= columns if name == "pairs" else {}
        data = build([file], tmp_path / name, eval_examples=False, num_workers=1, **options)
        store = store_of(rows, data)
        assert rows[0][text] in text_of(rows[0])
        for one, other in ((store.gather, data.train.gather), (store.trained, data.train.trained)):
            np.testing.assert_equal(one(np.zeros(1), 48), other(np.zeros(1), 48))


def test_texts_like_those_of_users_are_as_near_as_users_are_to_each_other(data, rng):
    def measured(texts):
        return distances(store_of([{"text": text} for text in texts], data), data.eval_users)

    alike, shuffled = (
        measured(say(rng, 200)),
        measured(["".join(rng.permutation(list(text))) for text in say(rng, 200)]),
    )
    other = measured(say(rng, 200, "il gatto dorme sul tavolo e non vuole mangiare".split()))
    for name, row in alike.items():
        assert row["total_variation"] < row["total_variation_of_users"] + 0.1, name
    for name in ("2-grams", "3-grams"):
        for far in (shuffled, other):
            for kind in ("total_variation", "jensen_shannon"):
                assert far[name][kind] > 2 * alike[name][kind]
    assert shuffled["lengths"] == pytest.approx(alike["lengths"], abs=0.2)


def test_a_small_set_is_compared_with_as_few_texts_of_users(data, rng):
    """Few texts of one distribution differ from many by chance, and so do those of users."""
    few = store_of([{"text": text} for text in say(rng, 10)], data)
    row = distances(few, data.eval_users)["2-grams"]
    assert row["total_variation"] < row["total_variation_of_users"] + 0.1


def test_a_user_counts_once_however_much_they_wrote(tmp_path):
    """A user of one text and one of many weigh the same in every distribution."""
    data = dataset(tmp_path, {"a": ["x"]}, eval_users={"a": ["aaaa"], "b": ["bbbb"] * 9})
    store = data.eval_users
    weights = user_weights(store)
    assert weights.sum() == pytest.approx(1) and weights[0] == 0.5
    found = np.sort(grams(store, np.arange(store.num_examples), weights, 1))
    assert found[-2:] == pytest.approx([1 / 3, 1 / 3])  # four of the six tokens of each text


def test_equal_distributions_are_at_no_distance(rng):
    p, q = rng.dirichlet(np.ones(50), 2)
    assert total_variation(p, p) == jensen_shannon(p, p) == 0
    assert total_variation(p, q) == pytest.approx(np.maximum(p - q, 0).sum())
    m = (p + q) / 2
    expected = sum((each * np.log2(each / m)).sum() / 2 for each in (p, q))
    assert jensen_shannon(p, q) == pytest.approx(expected)
    apart = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert total_variation(*apart) == jensen_shannon(*apart) == 1


def test_a_curve_tells_equal_sets_from_others(rng):
    one, same = rng.normal(size=(2, 300, 8))
    shifted = one + 2.0 * (np.arange(8) == 0)
    equal, far = divergence_curve(one, same), divergence_curve(one, shifted)
    assert equal["area"] > 0.9 > 0.6 > far["area"] > 0
    assert divergence_curve(one, one)["area"] == pytest.approx(1)
    assert divergence_curve(one, same) == equal
    assert np.all(np.diff(far["x"]) >= 0) and np.all(np.diff(far["y"]) <= 1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps that has ended."""
    path = tmp_path_factory.mktemp("run") / "run"
    flags = (
        "uls --data pydocs --model micro --epsilon 8 --num-steps 2 --batch-size 8 --engine local"
    )
    main(
        [
            "train",
            *flags.split(),
            "--run-dir",
            str(path),
            "--eval-examples",
            "4",
            "--strategy",
            "scan",
        ]
    )
    return path


def test_a_run_is_measured_with_noise_and_without(run, rng, tmp_path):
    stored = directory.load(run)
    settings = changed_run(stored.run, engine="local")
    place = Path(json.loads((run / "budget.json").read_text())["ledger"])

    def paid():
        with hold(place) as ledger:
            of_run = str(run.absolute())
            return [each for each in ledger.entries.values() if each.place.startswith(of_run)]

    (training,) = paid()
    rows = [{"text": text} for text in say(rng, 60)]
    student = Student("micro", 2, 8)
    how = {"student": student, "kept": tmp_path / "loss.json"}
    found = measure(stored, settings, rows, epsilon=2.0, **how)
    released = found["public"]["student"]
    assert released["epsilon"] == 2.0 and released["trained_on"] == "synthetic texts"
    assert released["loss"] != found["private"]["student"]["losses"]["synthetic"]
    losses = found["private"]["student"]["losses"]
    assert losses["synthetic"] < losses["untrained"]
    assert all("publish" in fact for fact in found["private"]["non_private"])
    json.dumps(found)
    counted = paid()
    assert counted[0] == training and [each.kind for each in counted[1:]] == ["evaluation"]
    again = measure(stored, settings, rows, epsilon=2.0, **how)  # as of a command that goes on
    assert again["public"]["student"] == released
    assert paid() == counted  # once
    with refuses("eval_epsilon=1.0", says="2, which is paid already"):
        measure(stored, settings, rows, epsilon=1.0, **how)


def test_features_do_not_depend_on_the_texts_beside_them(run):
    from fedsim.run import find_model

    model = find_model(str(run))
    texts = ["a short text", "another text, " * 6, ""]
    together = features(model, texts)
    np.testing.assert_allclose(together[1:2], features(model, texts[1:2]), atol=1e-5)
    assert together.shape == (3, 16) and np.isfinite(together).all()
    assert curve_of_texts(model, texts, texts) is None  # too few for two clusters
    with pytest.raises(ConfigError, match="tokenizer"):
        features(model._replace(tokenizer=None), texts)


def test_data_without_held_out_users_are_refused(data):
    with pytest.raises(ConfigError, match="held-out users"):
        distances(data.train, dataclasses.replace(data, eval_users=None).eval_users or _one())


def _one():
    return UserStore.from_examples({"a": [[1, 2, 3]]}, 48, 257)
