"""Advice that training keeps: same sigma, C and M; shares, the choice, and how it is refused."""

import dataclasses
import json
import math

import numpy as np
import pytest
from problems import users_of_sizes
from test_cli import run, texts  # noqa: F401

from fedsim import accounting
from fedsim.cli.main import parse
from fedsim.clipping import Clip
from fedsim.config import Algorithm
from fedsim.data import corpora
from fedsim.keys import SecretKey
from fedsim.plan import Caveat, Fact, fill_defaults, make_plan, method_for
from fedsim.tuning.advice import choose
from fedsim.tuning.estimates import share_used

FLAGS = (
    "--epsilon 4 --num-steps 7 --batch-size 40 --max-length 24 --engine local --users 12".split()
)
FLAGS += ["--strategy", "scan", "--rows-per-pass", "3", "--model", "micro"]


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
    plan = make_plan(algorithm, privacy, data.train, method, 1, non_private, "")
    return plan, train


@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_training_adds_exactly_the_noise_that_was_predicted(algorithm, advised):
    each = advised[0][algorithm]
    plan, train = planned(each["command"])
    assert each["batch_size"] == plan.budget
    assert each["sampling_prob"] == plan.sampling.prob
    for name in "group_size expected_count clip_norm noise_multiplier".split():
        assert each[name] == getattr(plan, name), name
    assert (plan.target_epsilon, plan.num_steps, plan.delta) == (4.0, 7, advised[0]["delta"])
    clip = plan.clip
    assert each["added_stddev"] == clip.sensitivity * plan.noise_multiplier / plan.expected_count
    real = each["gradients"] / (7 * each["batch_size"]) if algorithm == "els" else 1
    assert each["noise_per_step"] == pytest.approx(each["added_stddev"] * plan.clip_norm / real)
    assert (train["run"].learning_rate, train["run"].engine.kind) == (
        0.3,
        "local",
    )  # flags are passed on
    assert 3.99 < accounting.epsilon([(plan.event(), 7)], plan.delta) <= 4
    assert (each["sampling"], each["noise"]) == (plan.sampling.kind, plan.noise.kind)
    error = plan.predicted_error * plan.clip_norm / plan.expected_count / real
    assert each["noise_on_sums"] == pytest.approx(error)
    chosen = min(each["cells"], key=lambda cell: cell["ratio"])
    assert (chosen["sampling"], chosen["bands"]) == (each["sampling"], each["bands"])


def test_the_group_sizes_are_those_of_the_heuristics(advised):
    result = advised[0]
    assert result["els"]["group_size"] == result["median_examples"]
    uls, last = result["uls"], result["turns"][-1]
    assert uls["group_size"] * uls["expected_count"] == uls["batch_size"] <= 40
    group, cohort = last["at"]["group_size"], last["at"]["cohort_size"]
    assert uls["group_size"] == (2 * group if last["tau_group"] < last["tau_cohort"] else group)
    assert group * cohort < 40


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
    from fedsim.tuning.advice import Advice

    els, uls = (
        Advice(**{**advised[0][name], "algorithm": Algorithm(name)}) for name in ("els", "uls")
    )
    els, uls = (dataclasses.replace(a, noise_on_sums=n) for a, n in ((els, els_noise), (uls, 1.0)))
    chosen, reason = choose(els, uls)
    assert chosen.algorithm == best
    assert f"{min(els_noise, 1 / els_noise):.2f} times" in reason


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("group_size", [1, 3])
def test_the_share_of_data_used_is_what_draws_use(algorithm, group_size, key):
    from fedsim.config import PrivacyConfig

    users, steps, repeats = users_of_sizes([1, 2, 5, 12, 3, 7]), 4, 300
    privacy = PrivacyConfig(1.0, steps, batch_size=3, delta=1e-5, group_size=group_size)
    shares = []
    for repeat in range(repeats):
        method = method_for(algorithm, privacy, users, SecretKey.create(repeat))
        seen = np.unique(np.concatenate([method.draw(step).ravel() for step in range(steps)]))
        shares.append((seen >= 0).sum() / users.num_examples)
    prob = method.sampler.sampling_prob
    expected = share_used(algorithm, np.diff(users.offsets), group_size, prob, steps)
    assert np.mean(shares) == pytest.approx(expected, abs=5 * np.std(shares) / math.sqrt(repeats))


@pytest.mark.slow
@pytest.mark.ci
def test_plain_clipping_adds_noise_in_the_units_of_the_gradient(texts, capsys):  # noqa: F811
    args = [
        "recommend",
        "--data",
        texts,
        *FLAGS,
        "--clipping",
        "plain",
        "--delta",
        "1e-5",
        "--json",
    ]
    code, out, err = run(*args, capsys=capsys)
    assert code == 0, err
    uls = json.loads(out)["uls"]
    assert uls["added_stddev"] == pytest.approx(uls["noise_per_step"])
    plan, train = planned(uls["command"])
    assert plan.clip == Clip(uls["clip_norm"]) and train["privacy"].delta == 1e-5


def test_a_budget_below_algorithm_3s_start_is_kept(texts, capsys):  # noqa: F811
    flags = ["5" if arg == "40" else arg for arg in FLAGS]
    code, out, err = run("recommend", "--data", texts, *flags, "--json", capsys=capsys)
    assert code == 0, err
    result = json.loads(out)
    assert (result["uls"]["group_size"], result["uls"]["expected_count"]) == (1, 5)
    assert result["els"]["expected_count"] == 5 and result["turns"] == []


def test_a_plan_alone_computes_no_gradient_and_is_kept_by_training(texts, monkeypatch):  # noqa: F811
    def none(*args, **kwargs):
        raise AssertionError("workers are started")

    monkeypatch.setattr("fedsim.engine.factory.create", none)
    command = ["recommend", "--data", str(texts), *FLAGS, "--plan-only"]
    found, lines = parse(command)()
    assert found["looked_at"] is None and "Defaults used because no text was read" in lines[0]
    for algorithm in ("els", "uls"):
        each = found[algorithm]
        plan, _ = planned(each["command"])
        assert each["sampling_prob"] == plan.sampling.prob
        for name in "group_size expected_count clip_norm noise_multiplier".split():
            assert each[name] == getattr(plan, name), name
        assert "--tuned-on-data" not in each["command"]  # no text was read
    assert found["uls"]["group_size"] == 1
