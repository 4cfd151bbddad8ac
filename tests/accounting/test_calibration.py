"""Calibration: the target is met and hardly more, what was found is kept, progress is not noise."""

import dataclasses
import json

import numpy as np
import pytest

from fedsim import accounting
from fedsim.accounting import StepEvent, calibration, composition


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path))
    return tmp_path


CALIBRATIONS = [
    dict(epsilon=4.0, delta=1e-6, num_steps=100, sampling_prob=0.02, max_contributions=16),
    dict(epsilon=0.001, delta=1e-6, num_steps=1000, sampling_prob=0.01),
    dict(epsilon=500.0, delta=1e-6, num_steps=1000, sampling_prob=0.01, max_contributions=32),
    dict(epsilon=1.0, delta=1e-3, num_steps=1, sampling_prob=1.0, max_contributions=2),
    dict(epsilon=4, delta=1.13e-9, num_steps=10000, sampling_prob=2.3e-5, max_contributions=128),
]


@pytest.mark.parametrize("target", CALIBRATIONS, ids=str)
def test_calibrated_noise_meets_the_target_and_hardly_more(target, cache):
    sigma = accounting.noise_multiplier(**target)
    event = StepEvent(sigma, target["sampling_prob"], target.get("max_contributions", 1))

    def spent(factor):
        scaled = dataclasses.replace(event, noise_multiplier=sigma * factor)
        return accounting.epsilon([(scaled, target["num_steps"])], target["delta"])

    assert spent(1.0) <= target["epsilon"]
    assert spent(1 - 1e-3) > target["epsilon"]


def test_calibrated_steps_and_probability_meet_the_target(cache):
    given = dict(epsilon=3.0, delta=1e-6, noise_multiplier=1.0, max_contributions=2)
    steps = accounting.num_steps(**given, sampling_prob=0.01)
    event = StepEvent(1.0, 0.01, 2)
    assert accounting.epsilon([(event, steps)], 1e-6) <= 3.0
    assert accounting.epsilon([(event, steps + 1)], 1e-6) > 3.0
    prob = accounting.sampling_prob(**given, num_steps=steps)
    assert accounting.epsilon([(StepEvent(1.0, prob, 2), steps)], 1e-6) <= 3.0
    assert 0.01 * (1 - 1e-4) <= prob <= 0.01 * (1 + 1e-2)
    loose = dict(epsilon=50.0, delta=1e-3, noise_multiplier=10.0, num_steps=1)
    assert accounting.sampling_prob(**loose) == 1.0


def test_calibrations_are_kept_on_disk(cache, monkeypatch):
    target = dict(epsilon=2.0, delta=1e-5, num_steps=10, sampling_prob=0.1)
    first = accounting.noise_multiplier(**target)
    (file,) = cache.iterdir()
    monkeypatch.setattr(calibration, "calibrate", lambda *args: pytest.fail("solved again"))
    assert accounting.noise_multiplier(**target) == first
    monkeypatch.setattr(calibration, "calibrate", lambda *args: 7.0)
    assert accounting.noise_multiplier(**{**target, "epsilon": 2.1}) == 7.0
    assert (
        accounting.sampling_prob(epsilon=2.0, delta=1e-5, num_steps=10, noise_multiplier=1) == 7.0
    )
    file.write_text("{ not json")
    assert accounting.noise_multiplier(**target) == 7.0
    assert json.loads(file.read_text())["value"] == 7.0
    monkeypatch.setattr(calibration, "ACCOUNTANT_VERSION", -1)
    monkeypatch.setattr(calibration, "calibrate", lambda *args: 8.0)
    assert accounting.noise_multiplier(**target) == 8.0


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["noise_multiplier", "sampling_prob", "num_steps"])
def test_a_value_in_the_cache_that_was_changed_is_as_if_absent(name, cache):
    """Whoever can write to the cache decides no noise: neither too little of it nor too much."""
    given = {"noise_multiplier": 2.0, "sampling_prob": 0.1, "num_steps": 3}
    del given[name]
    target = dict(epsilon=0.5, delta=1e-2, **given)
    first = getattr(accounting, name)(**target)
    (file,) = cache.iterdir()
    for value in (0.5 * first, 1.01 * first, 3.5, 1e-9):
        file.write_text(json.dumps({"value": value}))
        assert getattr(accounting, name)(**target) == first, value
        assert json.loads(file.read_text())["value"] == first


def test_what_is_no_positive_number_in_the_cache_is_as_if_absent(tmp_path):
    file = tmp_path / "file.json"
    odd = ("nan", "null", '"2.5"', "-1", "0", "1e308", "1e400", "true", "[]", "{}", "7" * 500)
    whole = ("", "null", "3", "[" * 10**5, "[2]", "\xff", '{"value": 1' + " " * 2**17 + "}")
    for text in (*(f'{{"value": {value}}}' for value in odd), *whole):
        file.write_text(text, encoding="latin-1")
        assert calibration._kept(file) is None, text[:50]
    assert calibration._kept(tmp_path) is None and calibration._kept(tmp_path / "none") is None
    file.write_text('{"value": 2}')
    assert calibration._kept(file) == 2


@pytest.mark.privacy
def test_mu_by_which_runs_are_admitted_and_claimed_is_on_no_disk(cache):
    assert accounting.gaussian_mu([(StepEvent(3.25, 0.5), 2)], 1e-7) > 0
    assert not list(cache.iterdir())


def test_cache_directory_follows_xdg_and_need_not_be_writable(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSIM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(calibration, "calibrate", lambda *args: 7.0)
    target = dict(epsilon=2.0, delta=1e-5, num_steps=10, sampling_prob=0.1)
    accounting.noise_multiplier(**target)
    assert len(list((tmp_path / "xdg" / "fedsim").iterdir())) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "file"))
    assert accounting.noise_multiplier(**target) == 7.0


def test_targets_out_of_reach_are_refused(cache):
    with pytest.raises(ValueError, match="epsilon=0.01: expected at least .*, spent by one step"):
        accounting.num_steps(epsilon=0.01, delta=1e-6, noise_multiplier=0.5, sampling_prob=0.5)


def test_progress_is_silent_at_first_and_then_at_most_once_a_second(monkeypatch):
    now = iter(np.arange(0, 1000, 0.4))
    monkeypatch.setattr(composition.time, "monotonic", lambda: float(next(now)))
    said: list[str] = []
    report = composition.throttled(said.append)
    for index in range(20):
        report(str(index))
    assert said[0] == "4"
    assert len(said) == 6
    composition.throttled(None)("nobody listens")
