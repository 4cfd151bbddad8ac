"""The histogram of labels: each user counts once, the noise is exact, and it is released once."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats
from test_verify import write_texts

import fedsim
from fedsim.accounting import PureEvent, epsilon, epsilon_with
from fedsim.budget.ledger import hold, place_of
from fedsim.cli.main import main
from fedsim.data import Dataset, Tokenizer, UserStore, label_prompts, labels_of
from fedsim.data.building.build import build
from fedsim.errors import ConfigError, FedsimError, FileDamaged
from fedsim.evaluate import last_model
from fedsim.keys import SecretKey
from fedsim.noise import discrete_laplace
from fedsim.plan import claimed_phases
from fedsim.run import Console, directory, ledger
from fedsim.training import (
    HISTOGRAM,
    RECEIPTS,
    LabelHistogram,
    draw_histogram,
    label_shares,
    release_histogram,
    stored_histogram,
    total_epsilon,
)
from fedsim.training.label_histogram import UNITS

pytestmark = [pytest.mark.slow, pytest.mark.ci]

NAMES = ["red", "green", "blue", "grey"]
LABELS = {"column": "hue", "labels": NAMES, "template": "{column}: {label}\n\n"}
PROMPTS = label_prompts(LABELS, Tokenizer.bytes())


def store_of(users):
    """A store of users, each a list of numbers of labels; a user without labels has no texts."""
    prompts = [*PROMPTS.values()]
    examples = {f"u{i:03}": [[*prompts[n], 65] for n in rows] for i, rows in enumerate(users)}
    return UserStore.from_examples(examples, 64, 257)


def shares(users):
    return label_shares(store_of(users), [*PROMPTS.values()])


@pytest.mark.privacy
def test_a_user_moves_the_counts_by_one_user_in_all_however_many_the_texts(rng, monkeypatch):
    monkeypatch.setattr("fedsim.training.label_histogram.USERS_AT_ONCE", 3)
    users = [rng.integers(4, size=size).tolist() for size in (1, 2, 3, 7, 40, 1, 5)]
    whole = shares(users)
    assert whole.sum() == UNITS * len(users)
    for i, texts in enumerate(([0], [3] * 50, [0, 1, 2], [0, 1, 2, 3] * 9, [1, 1, 2], [])):
        others = shares([*users[:i], [], *users[i + 1 :]])
        changed = shares([*users[:i], texts, *users[i + 1 :]])
        assert np.abs(whole - others).sum() == UNITS
        assert np.abs(changed - others).sum() == (UNITS if texts else 0)
        assert (changed >= others).all()
    # A third each, and one part more for the first labels.
    assert shares([[0, 1, 2]]).tolist() == [342, 341, 341, 0]
    assert shares([[2, 2, 0]]).tolist() == [341, 0, 683, 0]


@pytest.mark.privacy
@pytest.mark.parametrize(("sensitivity", "eps"), [(1, 0.7), (3, 0.5), (8, 40.0)])
def test_the_noise_has_the_law_of_discrete_laplace(sensitivity, eps):
    """Against SciPy's law and, for what it costs, dp_accounting's."""
    drawn = discrete_laplace(20_000, sensitivity, eps, np.random.default_rng(3))
    law = stats.dlaplace(eps / sensitivity)
    inner = np.arange(law.ppf(0.002), law.ppf(0.998) + 1)
    expected = np.array([law.cdf(inner[0] - 1), *law.pmf(inner), law.sf(inner[-1])]) * len(drawn)
    found = [
        (drawn < inner[0]).sum(),
        *((drawn == x).sum() for x in inner),
        (drawn > inner[-1]).sum(),
    ]
    used = expected > 5
    found, expected = np.array(found)[used], expected[used]
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-3
    cost = privacy_loss_distribution.from_discrete_laplace_mechanism(
        eps / sensitivity, sensitivity, value_discretization_interval=1e-4
    )
    assert eps <= cost.get_epsilon_for_delta(0) < eps + 1e-3


@pytest.mark.privacy
def test_the_noise_of_a_histogram_is_of_scale_one_user_over_epsilon_and_of_its_key():
    store, eps = store_of([[0, 1], [1], [1, 1, 2]]), 0.5

    def counts(seed, eps=eps):
        key, tokenizer = SecretKey.create(seed), Tokenizer.bytes()
        return np.array(draw_histogram(store, LABELS, tokenizer, key, eps).counts)

    assert (counts(1) == counts(1)).all()
    exact = shares([[0, 1], [1], [1, 1, 2]]) / UNITS
    noise = np.concatenate([counts(seed) - exact for seed in range(400)])
    assert np.abs(noise).mean() == pytest.approx(1 / eps, rel=0.1)  # of Laplace noise, the scale
    one, other = ((counts(1, e) - exact) * e for e in (eps, 0.25))
    assert not np.allclose(one, other, atol=0.05)  # else both together would give the counts away


@pytest.mark.parametrize("eps", [0, -1, math.nan, 1e-9, 1e300])
def test_an_epsilon_without_noise_is_refused(eps):
    with pytest.raises(ConfigError, match=r"^epsilon="):
        discrete_laplace(1, 1, eps, np.random.default_rng(0))


def test_weights_are_shares():
    assert LabelHistogram(("a", "b"), (3.0, -1.0), 1).weights == (1.0, 0.0)
    assert LabelHistogram(("a", "b"), (-3.0, -1.0), 1).weights == (0.5, 0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run, data) of a training on texts with labels."""
    place = tmp_path_factory.mktemp("labels")
    rows = [
        {"user_id": f"user{user}", "text": f"say {name}", "hue": name}
        for user in range(40)
        for name in NAMES[: 1 + user % 3]
    ]
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(file, place / "data", max_length=40, condition_on="hue", labels=NAMES)
    train(place / "run", place / "data", **{"budget-ledger": place / "ledger"})
    return place / "run", place / "data"


def train(run, data, **more):
    flags = {"data": data, "epsilon": 1, "num-steps": 2, "batch_size": 12, "model": "micro"}
    flags |= {"strategy": "scan:2", "engine": "local", "run-dir": run, "delta": 1e-3, **more}
    main(["train", "uls", *(str(x) for name, v in flags.items() for x in (f"--{name}", v))])


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The trained run and the ledger that counts it, in copies of their own."""
    place = shutil.copytree(trained[0].with_name("ledger"), tmp_path / "ledger")
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(place))
    copy = shutil.copytree(trained[0], tmp_path / "run")
    receipt = json.loads((copy / "budget.json").read_text())
    (copy / "budget.json").write_text(json.dumps({**receipt, "ledger": str(place)}))
    return copy


def entries():
    with hold(place_of(None)) as book:
        return [each for each in book.entries.values() if each.kind == "labels"]


@pytest.mark.privacy
def test_a_histogram_is_released_once_and_counted_before(run, trained, capsys):
    eps = 0.5
    released = release_histogram(run, eps)
    assert released == stored_histogram(run) == release_histogram(run, eps)
    assert released.labels == tuple(NAMES) and sum(released.weights) == pytest.approx(1)
    [entry] = entries()
    assert entry.released == [(PureEvent(eps), 1)] and not entry.label
    with hold(place_of(None)) as book:
        ids = Dataset.open(trained[1]).train.user_ids()
        assert set(book.users_of(entry.users)) == set(book.users(ids))
    with pytest.raises(ConfigError, match=r"^epsilon=0.6: expected 0.5: .* released, once"):
        release_histogram(run, 0.6)
    stored = directory.load(run)
    phases = claimed_phases(stored.plan, ledger.phases(ledger.read(run)))
    together = epsilon([*phases, (PureEvent(eps), 1)], 1e-3)
    assert total_epsilon(run, released) == pytest.approx(together, rel=1e-3)
    # What noise that is not ideal takes of delta grows with the epsilon of both together.
    large, plan = dataclasses.replace(released, epsilon=14.0), stored.plan
    parts = [plan.slack_after(sum(count for event, count in phases))]
    whole = epsilon_with(parts, [*phases, (PureEvent(14.0), 1)], plan.delta)
    assert total_epsilon(run, large) == whole
    assert total_epsilon(run) == pytest.approx(fedsim.load(run).epsilon, rel=1e-3)
    main(["verify", str(run)])
    assert "OK          labels      4 counts of users, epsilon 0.5" in capsys.readouterr().out
    main(["publish", str(run), str(run.parent / "public")])  # its claim is of the model alone
    assert not [*(run.parent / "public").rglob("label*")]


@pytest.mark.privacy
def test_a_release_that_crashed_is_repeated_with_its_noise_and_counted_once(run, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedsim.training.label_histogram.write_json", crash)
        patched.setattr("fedsim.budget.admission._settle", lambda *_: None)  # killed, not ended
        with pytest.raises(KeyboardInterrupt):
            release_histogram(run, 0.5)
    [entry] = entries()
    assert entry.planned == [(PureEvent(0.5), 1)] and stored_histogram(run) is None
    with pytest.raises(FedsimError, match="the same run with other planned releases"):
        release_histogram(run, 0.75)
    released = release_histogram(run, 0.5)
    assert len(entries()) == 1
    stored, key = directory.load(run), SecretKey.load(run)
    store = Dataset.open(stored.run.data.source).train
    assert released == draw_histogram(store, stored.labels, Tokenizer.bytes(), key, 0.5)
    (run / HISTOGRAM).unlink()  # one that was released is not released again
    with pytest.raises(FedsimError, match="is an older copy of a run"):
        release_histogram(run, 0.5)


@pytest.mark.privacy
def test_nothing_is_drawn_beyond_a_limit_or_of_other_data(run, trained, tmp_path):
    with pytest.raises(ConfigError, match="limit_epsilon=0.4: expected a run that fits"):
        release_histogram(run, 0.5, limit_epsilon=0.4)
    assert not (run / HISTOGRAM).exists() and not entries()
    moved = trained[1].rename(tmp_path / "moved")
    file = tmp_path / "rows.jsonl"
    rows = [{"user_id": f"{i}", "text": "a", "hue": "red"} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(file, trained[1], condition_on="hue", labels=NAMES)
    try:
        with pytest.raises(ConfigError, match="expected the data of the run"):
            release_histogram(run, 0.5)
    finally:
        shutil.rmtree(trained[1])
        moved.rename(trained[1])
    assert not (run / HISTOGRAM).exists() and not entries()


@pytest.mark.privacy
def test_a_changed_histogram_is_noticed(run, capsys):
    released = release_histogram(run, 0.5)
    for counts in ((released.counts[0] + 1, *released.counts[1:]), released.counts[:-1]):
        changed = LabelHistogram(released.labels, counts, 0.5).as_dict()
        (run / HISTOGRAM).write_text(json.dumps(changed))
        with pytest.raises(SystemExit):
            main(["verify", str(run)])
        assert "VIOLATED    labels" in capsys.readouterr().out
    with pytest.raises(FileDamaged, match="expected labels, their counts and weights"):
        release_histogram(run, 0.5)


def test_a_run_without_labels_is_refused(trained, tmp_path):
    run = tmp_path / "run"
    train(run, write_texts(tmp_path / "texts.parquet"))
    assert "labels" not in json.loads((run / "config.json").read_text())
    with pytest.raises(ConfigError, match="expected a run of train on data with labels"):
        release_histogram(run, 0.5)
    (run / HISTOGRAM).write_text(json.dumps(LabelHistogram(("a",), (1.0,), 1.0).as_dict()))
    with pytest.raises(SystemExit):
        main(["verify", str(run)])


def test_a_seeded_run_has_a_histogram_without_a_guarantee(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    train(tmp_path / "run", trained[1], seed=1)
    release_histogram(tmp_path / "run", 0.5)
    assert "reproduction" in entries()[0].label and RECEIPTS == entries()[0].kind


def test_the_loss_is_of_the_text_and_not_of_its_label(trained):
    stored = directory.load(trained[0])
    task, params, data, _ = last_model(stored, stored.run, Console())
    rows, sizes = np.arange(len(NAMES)), data.train.sizes(np.arange(len(NAMES)))
    prompts = [*label_prompts(stored.labels, Tokenizer.load(data.tokenizer_path)).values()]
    before = np.array([len(prompts[n]) for n in labels_of(data.train, prompts)[rows]])
    _, predictions = task.nats(params, task.read("train", rows))
    assert np.asarray(predictions).tolist() == (sizes - before).tolist()
