"""Advice that training keeps: same sigma, C and M; shares, the choice, and how it is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from test_cli import run, texts  # noqa: F401

from fedsim import accounting
from fedsim.cli.main import parse
from fedsim.config import Algorithm
from fedsim.data import corpora
from fedsim.keys import SecretKey
from fedsim.noise import predicted_error
from fedsim.plan import Caveat, Fact, fill_defaults, make_plan, method_for
from fedsim.tuning.advice import Advice, choose

FLAGS = (
    "--epsilon 4 --num-steps 7 --batch-size 40 --max-length 24 --engine local --users 12 "
    "--strategy scan --rows-per-pass 3 --model micro"
).split()


@pytest.fixture(scope="module")
def advised(texts):  # noqa: F811
    """(result, what is printed to people) of `fedsim recommend`."""
    args = ["recommend", "--data", str(texts), *FLAGS, "--learning-rate", "0.3"]
    result, lines = parse(args)()
    return result, "\n".join(lines)


def planned(command):
    """The plan of the training that a printed command starts."""
    train = parse(command[1:]).keywords
    source = train["run"].data
    data = corpora.load(source.source, **source.options)
    algorithm, key = Algorithm(train["algorithm"]), SecretKey.create()
    privacy, non_private = fill_defaults(algorithm, train["privacy"], data)
    method = method_for(algorithm, privacy, data.train, key)
    return make_plan(algorithm, privacy, data.train, method, 1, non_private, ""), train["run"]


@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_training_adds_exactly_the_noise_that_was_predicted(algorithm, advised):
    each = advised[0][algorithm]
    plan, config = planned(each["command"])
    assert each["batch_size"] == plan.batch_size
    assert each["sampling_prob"] == plan.sampling.prob
    for name in "group_size expected_count clip_norm noise_multiplier".split():
        assert each[name] == getattr(plan, name), name
    assert (plan.target_epsilon, plan.num_steps, plan.delta) == (4.0, 7, advised[0]["delta"])
    added = plan.clip.sensitivity * plan.noise_multiplier / plan.expected_count
    real = added * plan.clip_norm / each["noise_per_step"]  # the places that are filled
    assert 0.5 < real < 1 if algorithm == "els" else real == pytest.approx(1)
    assert (config.learning_rate, config.engine.kind) == (0.3, "local")  # flags are passed on
    assert 3.99 < accounting.epsilon([(plan.event(), 7)], plan.delta) <= 4
    assert (plan.sampling.kind, plan.noise.kind) == ("poisson", "independent")  # none was asked for
    error = predicted_error(plan.noise_multiplier, plan.num_steps, plan.noise.bands)
    expected = error * plan.clip_norm / plan.expected_count / real
    assert each["noise_on_sums"] == pytest.approx(expected)


def test_the_group_sizes_are_those_of_the_heuristics(advised, texts, capsys, tmp_path):  # noqa: F811
    result, _ = advised
    assert result["els"]["group_size"] == result["median_examples"]
    uls = result["uls"]
    assert uls["group_size"] * uls["expected_count"] == uls["batch_size"] <= 40
    flags = ["5" if arg == "40" else arg for arg in FLAGS]  # below Algorithm 3's start
    (tmp_path / "uls").mkdir()  # of a run before
    flags = [*flags, "--run-dir", tmp_path, "--json"]
    code, out, err = run("recommend", "--data", texts, *flags, capsys=capsys)
    assert code == 0, err
    result = json.loads(out)
    found = [Path(result[name]["settings"]["run_dir"]).name for name in ("els", "uls")]
    assert found == ["els", "uls-2"]
    assert (result["uls"]["group_size"], result["uls"]["expected_count"]) == (1, 5)
    assert result["els"]["expected_count"] == 5


def test_what_is_not_private_is_said_and_passed_on_to_training(advised):
    result, printed = advised
    for part in ("group_size (", "group_size of ULS (", "clip_norm ("):
        assert any(part in fact for fact in result["non_private"]), part
    assert printed.count("not private: ") == len(result["non_private"])
    plan, _ = planned(result["uls"]["command"])
    for name in ("group_size", "clip_norm"):
        assert Caveat(Fact.TUNED_ON_DATA, name) in plan.non_private


@pytest.mark.parametrize("els_noise, best", [(0.5, "els"), (2.0, "uls"), (1.0, "els")])
def test_the_choice_is_less_noise_on_sums(els_noise, best, advised):
    els, uls = (
        dataclasses.replace(Advice(**advised[0][name]), algorithm=Algorithm(name), noise_on_sums=n)
        for name, n in (("els", els_noise), ("uls", 1.0))
    )
    assert choose(els, uls)[0].algorithm == best
