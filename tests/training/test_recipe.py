"""What a run's update is where its user leaves it open."""

import json
from types import SimpleNamespace

import pytest
from refused import refuses

from fedsim.cli.main import main
from fedsim.clipping import Clip
from fedsim.config import PLANNED, UPDATE, run_config
from fedsim.run import directory
from fedsim.training.optimizers import MOMENTUM_RATES, Noise, with_defaults
from fedsim.training.prepare import with_plan

FLAGS = ["--engine", "local", "--model", "micro", "--max-length", "16", "--epsilon", "8"]
FLAGS += "--num-steps 4 --batch-size 8 --strategy scan --rows-per-pass 1".split()


def rate(stddev, bound=1.0, num_steps=100, **settings):
    return update(Noise(stddev, bound, num_steps), **settings)["learning_rate"]


def update(noise, **settings):
    run = with_defaults(run_config(data="pydocs", run_dir="runs/x", **settings), noise)
    return {name: getattr(run, name) for name in UPDATE}


def test_more_noise_means_a_smaller_rate_and_none_a_bounded_one():
    rates = [rate(stddev) for stddev in (0.0, 0.001, 0.01, 0.02, 0.1)]
    assert rates == sorted(rates, reverse=True) and rates[0] == MOMENTUM_RATES["fresh"][-1]
    usual, exponent, _ = MOMENTUM_RATES["fresh"]
    assert rate(0.01) == pytest.approx(usual) and exponent > 1
    assert rates[2] == pytest.approx(2**exponent * rates[3], rel=0.01)


def test_sgd_goes_as_far_as_momentum():
    assert rate(0.01, optimizer="sgd") == pytest.approx(10 * rate(0.01), rel=0.01)
    assert rate(0.01, optimizer="sgd:momentum=0.9") == rate(0.01)
    half = rate(0.01, optimizer="momentum:momentum=0.5")
    assert half == pytest.approx(5 * rate(0.01), rel=0.01)
    with refuses("optimizer", says="momentum=1: expected momentum in"):
        rate(0.01, optimizer="sgd:momentum=1")


@pytest.mark.slow
def test_a_run_keeps_what_was_found_and_goes_on_with_it(run_dir, capsys):
    flags = ["train", "uls", "--data", "pydocs", *FLAGS, "--run-dir", str(run_dir)]
    main(flags)
    assert ", learning rate 0.0" in capsys.readouterr().err
    run = directory.load(run_dir).run
    assert run.optimizer == "momentum" and run.learning_rate is not None
    record = json.loads((run_dir / directory.CONFIG).read_text())["run"]
    assert {name: record[name] for name in PLANNED} == {n: getattr(run, n) for n in PLANNED}
    main([*flags, "--resume"])
    capsys.readouterr()
    for name, value, was in (
        ("learning_rate", "0.5", run.learning_rate),
        ("optimizer", "adam", "momentum"),
        ("eval_examples", "65", 32),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*flags, "--resume", f"--{name.replace('_', '-')}", value])
        assert f"{name}={value}: expected {was}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "num_steps, ema", [(1, 0), (10, 0), (20, 0.5), (100, 0.9), (1000, 0.99), (10**6, 1 - 1e-5)]
)
def test_the_average_looks_back_ten_steps(num_steps, ema):
    assert update(Noise(0.01, 1.0, num_steps))["ema"] == ema


@pytest.mark.parametrize(
    "num_steps, every, given, examples",
    [(10, None, None, 32), (300, None, None, 120), (2000, None, None, 512), (10, 30, None, 120)]
    + [(10, None, 8, 8), (10, None, 4096, 4096)],
)
def test_an_evaluation_has_no_more_examples_than_the_steps_before(
    num_steps, every, given, examples
):
    noise = {"gradient_noise_multiplier": 1.0, "strategy": None, "expected_count": 8}
    plan = SimpleNamespace(num_steps=num_steps, batch_size=8, clip=Clip(1.0), **noise)
    run = run_config(data="pydocs", run_dir="r", eval_every=every, eval_examples=given)
    assert with_plan(plan, None, run, fresh=True).eval_examples == examples
