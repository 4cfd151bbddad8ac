"""`recommend` for a price: noisy histograms, what they cost, and who counts it."""

import importlib
import json
import math

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from problems import users_of_sizes
from test_cli import run, texts  # noqa: F401
from test_norms import WIDTH, users_sharing

from experiments.harness.mean_task import MeanTask
from fedsim.budget import hold, place_of
from fedsim.config import PrivacyConfig, run_config
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.run import Console
from fedsim.tuning import private_estimates
from fedsim.tuning.private_estimates import NORMS, SIZES, NoisyNorms, Release, noisy_users

recommend = importlib.import_module("fedsim.tuning.recommend")
FLAGS = "--epsilon 4 --num-steps 7 --batch-size 64 --max-length 24 --engine local --users 20"
FLAGS = [*FLAGS.split(), "--strategy", "scan:3", "--model", "micro"]


@pytest.mark.privacy
@pytest.mark.parametrize("prob, count", [(1.0, 1), (0.02, 4), (0.3, 2)])
def test_the_price_is_that_of_dp_accounting(prob, count):
    release = Release.of(0.5, 1e-6, sampling_prob=prob, count=count)
    sigma = release.noise_multiplier
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    sampled = dp_accounting.PoissonSampledDpEvent(prob, gaussian)
    oracle = PLDAccountant(value_discretization_interval=1e-3)
    oracle.compose(dp_accounting.GaussianDpEvent(sigma / prob))
    oracle.compose(sampled, count)
    spent = oracle.get_epsilon(1e-6 - release.slack.delta) + release.slack.epsilon
    assert 0.49 < spent <= 0.5 * (1 + 1e-3)
    dearer = Release.of(1.0, 1e-6, sampling_prob=prob, count=count)
    assert dearer.noise_multiplier < sigma


@pytest.fixture(scope="module")
def release():
    return Release.of(1.0, 1e-6, sampling_prob=0.1, count=3)


@pytest.mark.privacy
def test_one_user_changes_one_count_by_one(release, key, monkeypatch):
    """Whatever the user wrote: the sums that get noise, before it is added."""
    sums = []

    def noted(total, stddev, rng):
        sums.append((total, stddev))
        return total

    monkeypatch.setattr(private_estimates, "noisy_number", noted)
    sizes = np.random.default_rng(0).integers(1, 60, 200)
    counts = {}
    for theirs in (0, 1, 7, 10**9):
        sizes[5] = theirs
        noisy_users(sizes, release, key)
        counts[theirs], stddevs = map(np.array, zip(*sums, strict=True))
        assert (stddevs == release.noise_multiplier / 0.1).all() and len(sums) == len(SIZES)
        sums.clear()
    assert counts[0].sum() == 199
    for theirs in (1, 7, 10**9):
        assert sorted(np.abs(counts[theirs] - counts[0]))[-2:] == [0, 1]


@pytest.mark.privacy
def test_the_noise_is_what_the_event_says(release, monkeypatch):
    """Empty data: counts are noise alone. Standard deviation within 5 standard errors."""
    monkeypatch.setattr(private_estimates, "LEAST_COUNT", -math.inf)
    rng, stddev = SecretKey.create().generator("test"), 3.0
    drawn = [private_estimates._noisy_histogram(np.zeros(0), NORMS, stddev, rng) for _ in range(60)]
    found = np.concatenate(drawn).std()
    assert abs(found - stddev) < 5 * stddev / math.sqrt(2 * 60 * len(NORMS))


def test_sizes_are_found_again_through_the_noise(key):
    """The median is within an octave; there are as many users as there were."""
    release = Release.of(2.0, 1e-6, sampling_prob=0.2, count=3)
    sizes = np.random.default_rng(1).integers(8, 16, 3000)
    made_up = noisy_users(sizes, release, key)
    assert made_up.num_users == 3000
    assert 8 <= np.median(np.diff(made_up.offsets)) < 16
    assert made_up.num_examples == pytest.approx(sizes.sum(), rel=0.3)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_norms_are_found_again_through_the_noise(share, key):
    task, offsets = users_sharing(share, num_users=400, size=4)
    release = Release.of(8.0, 1e-5, sampling_prob=0.5, count=3)
    engine = LocalEngine(task, num_lanes=2)
    norms = NoisyNorms(engine, jnp.zeros(WIDTH), offsets, key, most=4, release=release)
    for group in (1, 4, 4):
        expected = 3 * math.sqrt(share + (1 - share) / group)
        assert norms.user_norm(group) == pytest.approx(expected, rel=0.5)
    assert norms.example_norm(np.arange(4)) == norms.user_norm(1)
    norms.user_norm(2)
    with pytest.raises(AssertionError, match="3 histograms of norms were paid for"):
        norms.user_norm(3)


@pytest.mark.privacy
def test_one_users_texts_do_not_choose_the_program_of_other_users_norms(key):
    """Else their last bits would change, and with these, perhaps, other counts."""
    release = Release.of(8.0, 1e-5, sampling_prob=1.0, count=3)
    found = []
    for theirs in (1, 2, 9):
        calls, sizes = [], [*[1] * 40, theirs]
        task = MeanTask(np.ones((sum(sizes), WIDTH)))
        engine = LocalEngine(task, num_lanes=2)
        compute = engine.clipped_sum

        def noted(params, rows, clip, strategy, compute=compute, calls=calls):
            calls.append((rows.shape, strategy))
            return compute(params, rows, clip, strategy)

        engine.clipped_sum = noted
        offsets = users_of_sizes(sizes).offsets
        norms = NoisyNorms(engine, jnp.zeros(WIDTH), offsets, key, most=4, release=release)
        for group in (1, 2, 4):
            norms.user_norm(group)
        found.append(calls)
    assert found[0] == found[1] == found[2]
    assert {shape[1] for shape, _ in found[0]} == {1, 4}
    assert {strategy.units_at_once(1) for _, strategy in found[0]} == {1}  # as accelerators demand


@pytest.mark.privacy
def test_users_are_drawn_anew_for_each_histogram(release, key):
    """Each with probability q, independently of the others and of their texts."""
    sizes = np.full(2000, 3)
    sizes[:100] = 0
    offsets = users_of_sizes(sizes).offsets
    norms = NoisyNorms(None, None, offsets, key, most=4, release=release)
    one, two = (set(norms._sample(group).tolist()) for group in (1, 2))
    assert min(one) >= 100 and abs(len(one) - 190) < 5 * math.sqrt(171)
    assert abs(len(one & two) - 19) < 5 * math.sqrt(19)


@pytest.mark.slow
@pytest.mark.privacy
def test_what_it_prints_was_paid_for(texts, tmp_path, capsys, monkeypatch):  # noqa: F811
    """It is in the ledger of the data before a size or a gradient is looked at."""
    place = tmp_path / "ledger"
    looks = []

    def look(*args):
        with hold(place_of(place)) as ledger:
            looks.append([entry.kind for entry in ledger.entries.values()])
        return noisy_users(*args)

    monkeypatch.setattr(recommend, "noisy_users", look)
    words = ["recommend", "--data", texts, *FLAGS, "--budget-ledger", place]
    code, out, err = run(*words, "--tune-epsilon", 2, "--json", capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert looks == [["recommend"]]
    with hold(place_of(place)) as ledger:
        (entry,) = ledger.entries.values()
    assert entry.outcome == "released" and not entry.label
    release = Release(**{**found["released"], "slack": entry.slack})
    assert [*map(tuple, entry.planned)] == release.events and release.epsilon == 2
    assert release.delta == found["delta"]
    for algorithm in ("els", "uls"):
        assert "--chosen-on-data" not in found[algorithm]["command"]
        assert found[algorithm]["seconds"] is None
        assert found[algorithm]["clip_norm_interval"] is None
    assert found["non_private"] == []
    code, out, _ = run(*words, "--tune-epsilon", 2, capsys=capsys)
    assert code == 0 and "released with noise. This cost every user epsilon 2 at" in out
    assert "about" in out and "not private" not in out and "time, without" not in out


def test_where_users_are_added_or_removed_their_number_is_named_as_public(texts, tmp_path, capsys):  # noqa: F811
    """q, delta and the number of made-up users follow from it; nothing else is of the data."""
    words = {"num_steps": 7, "batch_size": 64, "adjacency": "add-or-remove", "epsilon": 4.0}
    settings = run_config(data=str(texts), run_dir=tmp_path, model="micro", engine="local")
    found = recommend.recommend(PrivacyConfig(**words), settings, Console(), plan_only=True)
    assert "of texts are longer" not in capsys.readouterr().err
    known, *more = found["non_private"]
    users = f"({found['num_users']} users)"
    assert known == f"public by assumption: how many users there are {users}"
    assert all(fact.startswith("delta=") for fact in more)


@pytest.mark.privacy
def test_a_limit_refuses_it_before_anything_is_read(texts, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(recommend, "noisy_users", lambda *_: 1 / 0)
    words = ["recommend", "--data", texts, *FLAGS, "--budget-ledger", tmp_path / "ledger"]
    words += ["--tune-epsilon", 2, "--limit-epsilon", 1]
    code, out, err = run(*words, capsys=capsys)
    assert code == 2 and not out and "limit_epsilon=1: expected a run that fits" in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tune-epsilon", 0], "tune_epsilon=0.0: expected > 0"),
        (["--tune-epsilon", 1e-10], "tune_epsilon=1e-10: expected a larger one: the slack"),
        (["--tune-epsilon", 300], "tune_epsilon=300.0: expected a smaller one: the slack"),
        (["--tune-epsilon", 1, "--sampling", "allocation"], "sampling=allocation: expected"),
        (["--tune-epsilon", 1, "--plan-only"], "expected none with plan_only, which is free"),
        (["--tune-epsilon", 1, "--plot", "x.png"], "none with tune_epsilon"),
        (["--tune-epsilon", 1, "--seed", 3], "seed=3: expected none with tune_epsilon"),
    ],
)
def test_mistakes_are_one_line(flags, message, texts, capsys):  # noqa: F811
    code, out, err = run("recommend", "--data", texts, *FLAGS, *flags, capsys=capsys)
    assert code == 2 and not out and message in err


def test_without_a_price_it_says_what_is_from_the_data(texts, capsys):  # noqa: F811
    code, out, _ = run("recommend", "--data", texts, *FLAGS, capsys=capsys)
    said = " ".join(out.split())
    assert code == 0 and "From the users' texts, without noise: how many examples" in said
    assert "--tune-epsilon E" in said


def test_a_plan_alone_depends_on_no_text(texts, tmp_path, capsys):  # noqa: F811
    """Of two data sets with as many users, the answers are equal."""
    import pyarrow.parquet as pq

    table = pq.read_table(texts)
    users = table["user_id"].to_pylist()
    first = [users.index(user) for user in dict.fromkeys(users)]
    pq.write_table(table.take(first), tmp_path / "one-text-each.parquet")
    found = []
    for source in (texts, tmp_path / "one-text-each.parquet"):
        words = ["recommend", "--data", source, *FLAGS, "--plan-only", "--json"]
        found.append(json.loads(run(*words, capsys=capsys)[1].replace(str(source), "DATA")))
    assert found[0] == found[1] and found[0]["median_examples"] == recommend.ASSUMED_EXAMPLES
