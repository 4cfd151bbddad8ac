"""Forecasts: the curve and its interval, what a probe trains, and x of so many users."""

import json
import math

import numpy as np
import pytest
from refused import refuses
from test_cli import texts  # noqa: F401

from fedsim import accounting
from fedsim.cli import main
from fedsim.cli.arguments import parse
from fedsim.config import default_delta
from fedsim.els import ELS
from fedsim.errors import FedsimError
from fedsim.tuning import report
from fedsim.tuning.forecast import PROBES, Curve, Probe
from fedsim.uls import ULS

FLAGS = "--epsilon 4 --num-steps 6 --batch-size 40 --max-length 24 --engine local --users 12"
FLAGS += " --strategy scan:3 --model micro --sampling poisson --seed 0"
SIGNALS = np.geomspace(0.5, 40, PROBES)


def read_off(gains):
    return Curve.fit([Probe(x, 16, gain) for x, gain in zip(SIGNALS, gains, strict=True)])


def test_a_curve_is_read_off_exactly_where_there_is_no_noise():
    curve = read_off(0.1 + 0.2 * np.log(SIGNALS) + 0.03 * np.log(SIGNALS) ** 2 / 10)
    assert curve.residual < 1e-12 and curve.freedom == PROBES - 3
    assert curve.at(3.0) == pytest.approx([0.1 + 0.2 * math.log(3) + 0.003 * math.log(3) ** 2] * 3)


@pytest.mark.parametrize("square", [-0.05, 0.05])
def test_more_signal_never_gains_less(square):
    curve = read_off(0.3 + square * np.log(SIGNALS / 4) ** 2)
    gains = [curve.at(x)[0] for x in np.geomspace(0.1, 100, 50)]
    assert (np.diff(gains) >= -1e-12).all() and np.ptp(gains) > 0.05


def test_intervals_hold_as_often_as_they_say(rng):
    truth = lambda x: 0.1 + 0.12 * np.log(x)  # noqa: E731
    inside = 0
    for _ in range(2000):
        curve = read_off(truth(SIGNALS) + rng.normal(0, 0.02, PROBES))
        _, low, high = curve.at(7.0)
        inside += low <= truth(7.0) + rng.normal(0, 0.02) <= high
    assert 0.935 < inside / 2000 < 0.965


def test_trainings_that_diverged_are_left_out_while_enough_are_there():
    gains = 0.1 * np.log(SIGNALS)
    assert read_off([math.nan, *gains[1:]]).at(4.0)[0] == pytest.approx(0.1 * math.log(4))
    with pytest.raises(FedsimError, match=f"^forecast: 4 of {PROBES} trainings diverged$"):
        read_off([math.nan] * 4 + [*gains[4:]])


@pytest.fixture(scope="module")
def found(texts):  # noqa: F811
    """(Result of `recommend --forecast`, (noise multiplier, batch size, C) of each noisy step)."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        for method in (ELS, ULS):

            def gradient(self, *args, _of=method.gradient, **options):
                count, norm = self.sampler.expected_count, options["clip"].norm
                steps.append((options["noise_multiplier"], count, norm))
                return _of(self, *args, **options)

            patch.setattr(method, "gradient", gradient)
        command = ["recommend", "--data", str(texts), *FLAGS.split(), "--forecast", "--json"]
        result = parse(main.Command, command)()
    return result, steps


def test_a_probe_is_trained_with_the_noise_of_its_x(found):
    result, steps = found
    probes = result["forecast"]["probes"]
    assert len(probes) == PROBES and len(steps) == 6 * PROBES
    best = result[result["recommended"]]
    group = best["group_size"] if best["algorithm"] == "uls" else 1
    for number, (sigma, count, norm) in enumerate(steps):
        probe = probes[number // 6]
        assert count == probe["batch_size"] // group and probe["batch_size"] <= 40
        assert norm == best["clip_norm"]
        assert count / (sigma * norm) == pytest.approx(probe["signal"])


def test_each_number_of_users_has_the_noise_that_the_accountant_says(found):
    result, _ = found
    best, rows = result[result["recommended"]], result["forecast"]["users"]
    by_users = {row["num_users"]: row for row in rows}
    here = by_users[result["num_users"]]
    assert here["noise_multiplier"] == pytest.approx(best["noise_multiplier"], rel=1e-3)
    assert here["signal"] == pytest.approx(
        best["expected_count"] / best["noise_multiplier"] / best["clip_norm"], rel=0.05
    )
    for users, row in by_users.items():
        shrunk = best["sampling_prob"] * result["num_users"] / users
        sigma = accounting.noise_multiplier(
            epsilon=4,
            delta=default_delta(users),
            num_steps=6,
            sampling_prob=shrunk,
            max_contributions=best["group_size"] if result["recommended"] == "els" else 1,
        )
        assert row["noise_multiplier"] == pytest.approx(sigma, rel=0.05), users
    assert sorted(by_users) == list(by_users) and len(by_users) >= 6
    signals = [row["signal"] for row in rows]
    assert signals == sorted(signals)
    assert all(row["low"] <= row["gain"] <= row["high"] for row in rows)


def test_a_forecast_is_shown_and_said_not_to_be_private(found):
    result, _ = found
    lines = report(result).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Forecast for "))
    (here,) = (line for line in lines[start:] if line.endswith("(these data)"))
    assert here.split()[:2] == [f"{result['num_users']:,}", "users"]
    assert any(fact.startswith("forecast") for fact in result["non_private"])
    assert "not private: forecast (trainings on the data without a guarantee)" in lines
    json.dumps(result)


@pytest.mark.parametrize(
    "more, said",
    [
        ("--plan-only", "none with plan_only"),
        ("--tune-epsilon 1", "none with plan_only or tune_epsilon"),
        ("--local-steps 2 --local-learning-rate 0.1", "none with local_steps"),
    ],
)
def test_what_does_not_go_with_it_is_refused(more, said, texts):  # noqa: F811
    command = ["recommend", "--data", str(texts), *FLAGS.replace(" --seed 0", "").split()]
    with refuses("forecast=True", says=said):
        parse(main.Command, [*command, "--forecast", *more.split()])()
