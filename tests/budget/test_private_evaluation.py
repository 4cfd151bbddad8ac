"""Evaluation with noise: a Gaussian mechanism, counted for those whose texts they are."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from problems import SoftmaxTask
from test_verify import write_texts

import fedsim
from fedsim import accounting
from fedsim.budget.ledger import hold
from fedsim.budget.spending import charge_of
from fedsim.cli.main import main
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.training.private_evaluation import MOST_ROWS, user_losses


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
    sizes = [3, 0, 1, 3 * MOST_ROWS, 2]
    features = rng.normal(size=(sum(sizes), 5)).astype(np.float32)
    labels = rng.integers(4, size=sum(sizes))
    theta = rng.normal(size=(5, 4)).astype(np.float32)

    def found(users):
        ends = np.concatenate([[0], np.cumsum(sizes)])
        kept = np.concatenate([np.arange(ends[u], ends[u + 1]) for u in users])
        task = SoftmaxTask(features[kept], labels[kept], 4)
        offsets = np.concatenate([[0], np.cumsum([sizes[u] for u in users])])
        vars(task)["dataset"] = SimpleNamespace(eval_users=SimpleNamespace(offsets=offsets))
        return task, offsets, user_losses(task, theta, "eval_users")

    task, offsets, everybody = found(range(5))
    assert len(everybody) == 4
    losses = np.asarray(task.losses(theta, task.read("eval_users", np.arange(sum(sizes)))))
    few = np.linspace(4, 4 + 3 * MOST_ROWS - 1, MOST_ROWS).astype(int)
    expected = [losses[:3].mean(), losses[3], losses[few].mean(), losses[-2:].mean()]
    assert everybody == pytest.approx(expected, rel=1e-5)
    assert found([0, 2, 3, 4])[2].tolist() == everybody.tolist()
    assert found([3, 4])[2].tolist() == everybody[2:].tolist()
    assert found([2, 0])[2].tolist() == everybody[[1, 0]].tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run, data) of a training that held out a third of 60 users."""
    place = tmp_path_factory.mktemp("private-evaluation")
    data = place / "data"
    build(write_texts(place / "texts.parquet", num_users=60), data, max_length=24, eval_users=0.3)
    flags = {"data": data, "epsilon": 1, "num-steps": 2, "batch_size": 12, "model": "micro"}
    flags |= {"strategy": "scan:2", "engine": "local", "run-dir": place / "run", "delta": 1e-3}
    main(["train", "uls", *(str(x) for name, v in flags.items() for x in (f"--{name}", v))])
    return place / "run", data


def evaluated(run, capsys, *flags):
    """(exit code, the JSON object or what was said)."""
    capsys.readouterr()
    try:
        main(["evaluate", str(run), *map(str, flags), "--json"])
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err
    return 0, json.loads(capsys.readouterr().out)


@pytest.mark.privacy
def test_an_evaluation_is_counted_for_those_whose_texts_it_is_of(trained, tmp_path, capsys):
    run, data = trained
    place = tmp_path / "ledger"
    code, first = evaluated(run, capsys, "--epsilon", 2, "--budget-ledger", place)
    assert code == 0 and 0 < first["loss"] < 2 * first["loss_bound"]
    size = Dataset.open(data).eval_users.num_users
    assert first["delta"] == 1e-6
    assert first["stddev"] == first["noise_multiplier"] * first["loss_bound"] / 2 / size
    spent = accounting.epsilon(
        [(accounting.StepEvent(first["noise_multiplier"], 1.0), 1)], first["delta"]
    )
    assert 2 * (1 - 1e-3) < spent <= 2
    how = ("--epsilon", 2, "--budget-ledger", place)
    _, second = evaluated(run, capsys, *how)  # not the same noise once more
    assert second["loss"] != first["loss"]
    other = fedsim.load(run).evaluate(epsilon=1, split="eval_examples", budget_ledger=place)
    assert other["split"] == "eval_examples" and other["epsilon"] == 1
    with hold(place) as ledger:
        entries = list(ledger.entries.values())
        held_out, of_training = (
            set(ledger.users(getattr(Dataset.open(data), split).user_ids()).tolist())
            for split in ("eval_users", "train")  # not of those alone who have texts held back
        )
        seen = [set(ledger.users_of(each.users).tolist()) for each in entries]
    assert [each.kind for each in entries] == ["evaluation"] * 3
    assert {each.outcome for each in entries} == {"released"}
    assert seen == [held_out, held_out, of_training] and not held_out & of_training
    assert not (run / "budget.json").read_text().count(str(tmp_path))  # the training's receipt
    assert json.loads(open(first["written_to"]).read())["loss"] == first["loss"]


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("told", ["--budget-ledger", "the variable"])
def test_a_later_release_is_counted_in_the_ledger_of_the_run(told, tmp_path, monkeypatch, capsys):
    """Whatever the working directory and the variable are by then."""
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts.parquet", num_users=60)
    build(texts, tmp_path / "data", max_length=24, eval_users=0.3)
    flags = "--epsilon 1 --num-steps 1 --batch-size 12 --model micro --strategy scan:2"
    flags += f" --engine local --run-dir run --data {tmp_path / 'data'}"
    if told == "--budget-ledger":
        flags += " --budget-ledger ledger"
    else:
        monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    main(["train", "uls", *flags.split()])
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "another"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run, place = tmp_path / "run", tmp_path / "ledger"
    limit = ["--limit-epsilon", "3", "--delta", "1e-6", "--budget-ledger", str(place)]
    main(["budget", *limit])
    code, said = evaluated(run, capsys, "--epsilon", 1)
    assert code == 0, said
    fedsim.load(run).evaluate(epsilon=0.5)
    code, said = evaluated(run, capsys, "--epsilon", 3)
    assert code == 2 and "limit_epsilon=3: expected a run that fits" in said
    with hold(place) as ledger:
        assert [each.kind for each in ledger.entries.values()] == ["train", *["evaluation"] * 2]
    assert not (tmp_path / "another").exists() and not os.listdir(tmp_path / "elsewhere")
    place.rename(tmp_path / "gone")
    code, said = evaluated(run, capsys, "--epsilon", 1)
    assert code == 2 and f"budget_ledger={place}: expected the ledger that counts the run" in said
    assert evaluated(run, capsys, "--epsilon", 1, "--budget-ledger", tmp_path / "gone")[0] == 0


@pytest.mark.privacy
def test_an_evaluation_over_the_limit_is_refused_before_it_is_made(trained, tmp_path, capsys):
    run, data = trained
    here = ("--budget-ledger", tmp_path / "ledger")
    main(["budget", str(data), "--limit-epsilon", "2.5", "--delta", "1e-6", *map(str, here)])
    assert evaluated(run, capsys, "--epsilon", 2, *here)[0] == 0
    kept = sorted((run / "evaluations").iterdir())
    code, said = evaluated(run, capsys, "--epsilon", 2, *here)
    assert code == 2 and "limit_epsilon=2.5: expected a run that fits" in said
    code, said = evaluated(run, capsys, "--epsilon", 0.1, "--limit-epsilon", 0.5, *here)
    assert code == 2 and "limit_epsilon=0.5: expected a run that fits" in said
    assert sorted((run / "evaluations").iterdir()) == kept
    assert evaluated(run, capsys, "--epsilon", 0.1, *here)[0] == 0


@pytest.mark.privacy
def test_one_that_was_killed_counts_whole(trained, tmp_path, monkeypatch, capsys):
    def killed(*args):
        raise KeyboardInterrupt

    run, data = trained
    place = tmp_path / "ledger"
    monkeypatch.setattr("fedsim.training.private_evaluation.user_losses", killed)
    assert evaluated(run, capsys, "--epsilon", 2, "--budget-ledger", place)[0] == 130
    with hold(place) as ledger:
        (entry,) = ledger.entries.values()
    assert len(entry.planned) == 1 and charge_of(entry, ledger).released == entry.planned


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--split", "test"), "split=test: expected --epsilon"),
        (("--delta", 0.1), "delta=0.1: expected --epsilon"),
        (("--epsilon", 0), "epsilon=0.0: expected > 0"),
        (("--epsilon", 1, "--loss-bound", -1), "loss_bound=-1.0: expected > 0"),
        (("--epsilon", 1, "--split", "test"), "split=test: expected a split that the data have"),
        (("--epsilon", 1, "--engine", "ray"), "engine=ray: expected local"),
    ],
)
def test_what_does_not_go_together_is_refused(trained, capsys, flags, said):
    code, found = evaluated(trained[0], capsys, *flags)
    assert code == 2 and said in found
