"""What follows the privatised gradient: schedules, decay, averages, and runs that go wrong."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refuses

from fedsim.cli.main import main
from fedsim.config import run_config
from fedsim.run import checkpoint
from fedsim.training.optimizers import (
    Noise,
    averaged,
    optimizer,
    rate_of,
    with_defaults,
)

FLAGS = ["--engine", "local", "--model", "micro", "--max-length", "16", "--epsilon", "8"]
FLAGS += ["--num-steps", "12", "--batch-size", "8", "--eval-examples", "8", "--seed", "1"]
FLAGS += ["--strategy", "scan", "--rows-per-pass", "1", "--checkpoint-every", "4"]

SLOW = [pytest.mark.slow, pytest.mark.ci]


def run_of(**settings):
    given = {
        "data": "pydocs",
        "run_dir": "runs/x",
        "optimizer": "adafactor",
        "ema": 0.0,
        **settings,
    }
    return with_defaults(run_config(**given), Noise(1.0, 1.0, 100))


def rates(num_steps, **settings):
    rate = rate_of(run_of(learning_rate=2.0, **settings), num_steps)
    return [float(rate(step)) if callable(rate) else rate for step in range(num_steps)]


def test_schedules_fall_to_zero_after_the_last_step():
    np.testing.assert_allclose(rates(4, schedule="linear"), [2.0, 1.5, 1.0, 0.5])
    cosine = [1 + np.cos(np.pi * step / 4) for step in range(4)]
    np.testing.assert_allclose(rates(4, schedule="cosine"), cosine, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["adam:b3=1", "adam:b1", "adam:b1=x", "momentum:learning_rate=3", "sgd:momentum=true,x=1"],
)
def test_other_options_are_refused_in_one_line(name):
    with refuses(f"optimizer={name}"):
        optimizer(name, 0.1)


def test_the_average_is_the_weighted_mean_of_all_steps(rng):
    steps, ema = rng.normal(size=(7, 3)), 0.8
    average = jnp.asarray(rng.normal(size=3))  # where it starts does not matter
    for number, params in enumerate(steps, 1):
        average = averaged(average, jnp.asarray(params), ema, number)
    weights = ema ** np.arange(6, -1, -1)
    np.testing.assert_allclose(average, weights @ steps / weights.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["uls", "els"])
def test_a_run_hands_out_the_average_of_its_steps(algorithm, tmp_path):
    run_dir = tmp_path / "run"
    flags = [*FLAGS, "--ema", "0.5", "--checkpoint-every", "1"]
    main(["train", algorithm, "--data", "pydocs", "--run-dir", str(run_dir), *flags])
    before, last = map(checkpoint.load, checkpoint.kept(run_dir))
    expected = averaged(before["average"], last["params"], 0.5, 12)
    jax.tree.map(np.testing.assert_array_equal, last["average"], expected)
    released = checkpoint.load_params(checkpoint.kept(run_dir)[-1])
    jax.tree.map(np.testing.assert_array_equal, released, last["average"])
    digests = [checkpoint.params_sha256(last[name]) for name in ("params", "average")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["params_sha256"] == digests[1] != digests[0]
    main(["verify", str(run_dir), "--replay"])  # from a checkpoint on, to the same average


@pytest.mark.parametrize(
    "optimizer, rate, why",
    [
        pytest.param(*("adafactor", 1e30, "the largest parameter is "), marks=SLOW),
        ("sgd", 1e3, "the largest parameter is "),
    ],
)
def test_a_training_that_diverges_ends_and_says_what_it_spent(
    optimizer, rate, why, tmp_path, capsys
):
    args = ["train", "uls", "--data", "pydocs", "--run-dir", str(tmp_path / "run"), *FLAGS]
    with pytest.raises(SystemExit) as ended:
        main([*args, "--optimizer", optimizer, "--learning-rate", str(rate)])
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("fedsim: error")]
    assert ended.value.code == 3
    assert f"learning_rate={rate:g}: expected a smaller one: {why}" in line
    spent = float(line.split("epsilon ")[1].split()[0])
    steps = len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) - 2
    assert 0 < spent <= 8 and steps < 12 and not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.privacy
def test_texts_of_those_who_are_protected_end_no_run(run_dir, monkeypatch):
    """Their loss has no noise, and when a run ends is public."""
    found = {"eval/loss": 1.0, "non_private/eval_examples_loss": math.nan}
    monkeypatch.setattr("fedsim.training.trainer.evaluate", lambda *_: found)
    main(["train", "uls", "--data", "pydocs", "--run-dir", str(run_dir), *FLAGS])
    assert json.loads((run_dir / "summary.json").read_text())["steps_done"] == 12
