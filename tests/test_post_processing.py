"""What follows the privatised gradient: schedules, decay, averages, and runs that go wrong."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained_models import make_texts

from fedsim.cli.main import main
from fedsim.config import run_config
from fedsim.run import checkpoint
from fedsim.training.optimizers import Noise, averaged, rate_of, with_defaults

FLAGS = "--engine local --model micro --max-length 16 --epsilon 8 --num-steps 12 --batch-size 8"
FLAGS += " --eval-examples 8 --seed 1 --strategy scan --rows-per-pass 1 --checkpoint-every"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("texts"))


def train(texts, run_dir, *flags, algorithm="uls", every=4):
    own = ["--data", str(texts), "--run-dir", str(run_dir), *FLAGS.split(), str(every)]
    main(["train", algorithm, *own, *flags])


@pytest.mark.parametrize(
    "schedule, factors",
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
    ],
)
def test_schedules_fall_to_zero_after_the_last_step(schedule, factors):
    given = {"optimizer": "adafactor", "ema": 0.0, "schedule": schedule, "learning_rate": 2.0}
    run = with_defaults(run_config(data="posts", run_dir="x", **given), Noise(1.0, 1.0, 100))
    rate = rate_of(run, 4)
    np.testing.assert_allclose([rate(step) / 2.0 for step in range(4)], factors, rtol=1e-6)


def test_the_average_is_the_weighted_mean_of_all_steps(rng):
    steps, ema = rng.normal(size=(7, 3)), 0.8
    average = jnp.asarray(rng.normal(size=3))  # where it starts does not matter
    for number, params in enumerate(steps, 1):
        average = averaged(average, jnp.asarray(params), ema, number)
    weights = ema ** np.arange(6, -1, -1)
    np.testing.assert_allclose(average, weights @ steps / weights.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["uls", "els"])
def test_a_run_hands_out_the_average_of_its_steps(algorithm, texts, run_dir):
    train(texts, run_dir, "--ema", "0.5", algorithm=algorithm, every=1)
    before, last = map(checkpoint.load, checkpoint.kept(run_dir))
    expected = averaged(before["average"], last["params"], 0.5, 12)
    jax.tree.map(np.testing.assert_array_equal, last["average"], expected)
    released = checkpoint.load_params(checkpoint.kept(run_dir)[-1])
    jax.tree.map(np.testing.assert_array_equal, released, last["average"])
    digests = [checkpoint.params_sha256(last[name]) for name in ("params", "average")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["params_sha256"] == digests[1] != digests[0]
    main(["verify", str(run_dir), "--replay"])  # from a checkpoint on, to the same average


def test_a_training_that_diverges_ends_and_says_what_it_spent(texts, run_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        train(texts, run_dir, "--optimizer", "sgd", "--learning-rate", "1000")
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("fedsim: error")]
    assert ended.value.code == 3
    assert "learning_rate=1000: expected a smaller one: the largest parameter is " in line
    spent = float(line.split("epsilon ")[1].split()[0])
    steps = len((run_dir / "ledger.jsonl").read_text().splitlines()) - 2
    assert 0 < spent <= 8 and steps < 12 and not (run_dir / "summary.json").exists()


@pytest.mark.privacy
def test_texts_of_those_who_are_protected_end_no_run(texts, run_dir, monkeypatch):
    """Their loss has no noise, and when a run ends is public."""
    found = {"eval/loss": 1.0, "non_private/eval_examples_loss": math.nan}
    monkeypatch.setattr("fedsim.training.trainer.evaluate", lambda *_, **__: found)
    train(texts, run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["steps_done"] == 12
