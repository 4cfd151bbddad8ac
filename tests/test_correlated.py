"""Correlated noise: what the accountant relies on, and what it does to sums of steps."""

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from problems import users_of_sizes
from test_verify import command as train_command, texts, verify  # noqa: F401 (a fixture)

import fedsim
from fedsim import accounting
from fedsim.config import Algorithm, PrivacyConfig
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.noise import (
    Correlated,
    add_gaussian,
    correlated,
    gaussian,
    predicted_error,
    release_shift,
)
from fedsim.noise.correlated import (
    coefficients,
    difference,
    inverse,
    prefix_error,
    rounding,
    strategy,
)
from fedsim.noise.independent import BLOCK, FARTHEST
from fedsim.plan import fill_defaults, make_plan, method_for

STEPS, BANDS, STDDEV = 12, 4, 1.3 * 2**20


def released(add_noise, sums, key, steps=range(STEPS), stddev=STDDEV):
    return [add_noise([sums], stddev=stddev, key=key, step=step)[0] for step in steps]


def rows_of(key, width, steps, bands=BANDS, stddev=STDDEV):
    """w of every step, from the object's own memory."""
    noise, found = Correlated(steps, bands), []
    for step in range(steps):
        noise([np.zeros(width, np.int64)], stddev=stddev, key=key, step=step)
        found.append(noise._rows[0][0].astype(object))
    return found


@pytest.mark.parametrize(
    "steps, bands, error",
    [(100, 2, 5.181516045299959), (500, 16, 4.701735267731326), (2000, 32, 6.482642560682406)],
)
def test_strategies_are_as_good_as_those_of_jax_privacy(steps, bands, error):
    """Golden: optimize_banded_toeplitz, sensitivity_squared, per_query_error of version 2.0."""
    c = coefficients(steps, bands)
    assert np.linalg.norm(c) == pytest.approx(1) and (c > 0).all()
    assert prefix_error(c, steps) == pytest.approx(error, rel=1e-9)


@pytest.mark.privacy
@pytest.mark.parametrize("bands", [2, 8, 64])
@pytest.mark.parametrize("sigma", [0.3, 1.3, 50.0, 1e4])
def test_the_fresh_noise_is_at_least_what_the_columns_need_in_exact_arithmetic(bands, sigma):
    found = strategy(500, bands, sigma * 2**20)
    square = sum(Fraction(c) ** 2 for c in found.coefficients.tolist())
    assert Fraction(found.stddev) ** 2 >= square * Fraction(sigma * 2**20) ** 2
    assert found.stddev == pytest.approx(math.sqrt(square) * sigma * 2**20, rel=1e-12)
    bits = found.coefficients * 2.0**24
    assert (bits == np.rint(bits)).all() and found.coefficients[0] == 1
    # Whatever the rows are, their sum is exact: a whole number of the last bit, below 2^53 of it.
    last = max(math.ldexp(1, -k) for k in range(25) if not (found.coefficients * 2.0**k % 1).any())
    assert np.abs(found.coefficients[1:]).sum() * found.largest < 2.0**53 * last
    exact = coefficients(500, bands)
    error = prefix_error(found.coefficients / math.sqrt(square), 500)
    assert error == pytest.approx(prefix_error(exact, 500), rel=1e-3)


@pytest.mark.privacy
def test_a_row_is_the_fresh_noise_less_multiples_of_the_rows_before_in_exact_arithmetic():
    """What the guarantee rests on: no rounding but that to a whole number, whatever came before."""
    key, plan = SecretKey.create(seed=3), strategy(STEPS, BANDS, STDDEV)
    rows = rows_of(key, 50, STEPS)
    error = Fraction(rounding(FARTHEST * plan.stddev))
    assert error < Fraction(1, 2**49)
    for step, row in enumerate(rows):
        fresh = gaussian(key.generator("noise", step, 0, 0), np.empty(50))
        for place in range(50):
            back = sum(
                Fraction(plan.coefficients[i]) * int(rows[step - i][place])
                for i in range(1, min(BANDS, step + 1))
            )
            exact = Fraction(fresh[place]) * Fraction(plan.stddev) - back
            assert abs(int(row[place]) - exact) <= Fraction(1, 2) + error
            assert abs(row[place]) <= plan.largest
    noise, cell = Correlated(STEPS, BANDS), 2 ** release_shift(STDDEV)
    for step, row in enumerate(rows):  # whatever they are added to, which are whole numbers too
        sums = np.random.default_rng(step).integers(-(2**31), 2**31, 50)
        exact = [Fraction(int(s) + int(w), cell) for s, w in zip(sums, row, strict=True)]
        found = noise([sums], stddev=STDDEV, key=key, step=step)[0]
        assert found.tolist() == [round(each) for each in exact]


@pytest.mark.privacy
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("stddev", [2.0**10, STDDEV, 2.0**30])
def test_noise_drawn_before_there_is_a_sum_is_the_same(bands, stddev, monkeypatch, rng):
    key, right = SecretKey.create(seed=4), add_gaussian
    rows, shape, sizes = [], {"stddev": stddev, "key": key}, (BLOCK + 5, 3)
    plain, ahead = Correlated(STEPS, bands), Correlated(STEPS, bands)
    monkeypatch.setattr(
        correlated, "add_gaussian", lambda *a, **k: rows.append(k) or right(*a, **k)
    )
    with ThreadPoolExecutor(1) as threads:
        for step in (2, 3, 6):  # as steps of a resumed run, and of one that lost some
            sums = [rng.integers(-(2**31), 2**31, size) for size in sizes]
            ahead.begin(threads, step, key, stddev, sizes)
            found = ahead(sums, **shape, step=step)
            assert bands > 1 or rows[-1]["row"]
            for a, b in zip(found, plain(sums, **shape, step=step), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
        ahead.begin(threads, 7, key, stddev, sizes)  # that of a step is taken for no other
        for other in ({"step": 8}, {"step": 9, "stddev": 2 * stddev}):
            pair = (noise(sums, **{**shape, **other}) for noise in (ahead, plain))
            list(map(np.testing.assert_array_equal, *pair))
        monkeypatch.setattr(correlated, "gaussian", None)
        ahead.begin(threads, 10, key, stddev, sizes)
        with pytest.raises(TypeError):
            ahead(sums, **shape, step=10)


@pytest.mark.privacy
@pytest.mark.parametrize("stddev", [0.3 * 2**20, 1.7 * 2**20, 1e4 * 2**20])
def test_what_is_rounded_is_exact_up_to_what_the_slack_counts(stddev, rng):
    """Products of 106 bits, rows as large as they may be: float64 alone would err by 2^-20."""
    count = 2000
    fresh = rng.uniform(-FARTHEST, FARTHEST, count)
    back = rng.integers(-(2**52), 2**52, count) * 2.0**-12
    exact = [Fraction(stddev) * Fraction(x) - Fraction(b) for x, b in zip(fresh, back, strict=True)]
    found = difference(fresh, stddev, back, np.empty((3, count)))
    assert rounding(2.0**25) == 15 * 2.0**-53
    error = Fraction(rounding(FARTHEST * stddev))
    assert error < Fraction(1, 2**36)
    for number, each in zip(found, exact, strict=True):
        assert int(number) == number and abs(int(number) - each) <= Fraction(1, 2) + error


@pytest.mark.privacy
@pytest.mark.parametrize("bands", [2, 5])
def test_released_noise_has_the_covariance_of_the_inverse_strategy(bands):
    """(S^-1 S^-T) sigma^2, S of columns of norm one: 40,000 coordinates are as many small runs."""
    key, width = SecretKey.create(seed=5), 40_000
    noise = Correlated(STEPS, bands)
    found = np.array(released(noise, np.zeros(width, np.int64), key), np.float64)
    found *= 2.0 ** release_shift(STDDEV) / STDDEV
    column = inverse(coefficients(STEPS, bands), STEPS)
    unmixed = np.array(
        [[column[i - j] if i >= j else 0 for j in range(STEPS)] for i in range(STEPS)]
    )
    expected = unmixed @ unmixed.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((found @ found.T / width - expected) / scale).max() < 6 / np.sqrt(width)


def test_one_band_is_independent_noise_bit_by_bit(rng, key):
    sums = rng.integers(-(2**20), 2**20, 700_000)
    for step in (0, 3):
        (own,) = Correlated(STEPS, 1)([sums], stddev=STDDEV, key=key, step=step)
        (independent,) = add_gaussian([sums], stddev=STDDEV, key=key, step=step)
        assert own.dtype == independent.dtype and (own == independent).all()


@pytest.mark.privacy
def test_a_step_that_is_not_the_next_one_draws_the_same(key):
    """Resumed, run again, or after another key: the rows follow from the key alone."""
    sums, noise = np.arange(1000), Correlated(STEPS, BANDS)
    whole = released(noise, sums, key)
    assert (released(noise, sums, key, [7, 7, 8, 3]) == np.array(whole)[[7, 7, 8, 3]]).all()
    other = SecretKey.create(seed=8)
    assert not (released(noise, sums, other, [4])[0] == whole[4]).any()
    assert (released(noise, sums, key, [5])[0] == whole[5]).all()


def planned(key, **changes):
    users = users_of_sizes([4] * 100)
    data = type("Data", (), {"train": users, "metadata": {}})
    settings = {"epsilon": 8.0, "num_steps": 40, "batch_size": 5, "noise": "correlated", **changes}
    privacy, non_private = fill_defaults(Algorithm.ULS, PrivacyConfig(**settings), data)
    method = method_for(Algorithm.ULS, privacy, users, key)
    return make_plan(Algorithm.ULS, privacy, users, method, 1000, non_private, "abc")


def test_the_plan_chooses_the_bands_and_says_the_slack(key):
    plan = planned(key)
    assert plan.sampling.kind == "cyclic" and plan.sampling.bands == plan.noise.bands > 1
    assert type(plan).from_dict(plan.as_dict()) == plan
    independent = planned(key, noise="independent")
    errors = [
        predicted_error(each.noise_multiplier, each.num_steps, each.noise.bands)
        for each in (plan, independent)
    ]
    assert errors[0] < errors[1]
    assert independent.slack.epsilon < plan.slack.epsilon < 1e-4
    assert plan.slack.epsilon < dataclasses.replace(plan, num_parameters=10**6).slack.epsilon
    spent = accounting.epsilon([(plan.event(), 40)], plan.delta)
    assert 7.9 < spent <= 8


@pytest.mark.privacy
@pytest.mark.parametrize("cap, in_every_step", [(1, False), (3, False), (3, True)])
def test_the_privacy_loss_of_a_planted_user_is_what_is_claimed(cap, in_every_step):
    """Monte Carlo of the noise that runs add, released and rounded: many runs of one coordinate.

    A user's examples all push it by C; how many are in a step is binomial. The best test there is
    reaches the claimed delta, and does not exceed it. Planted mistake: it does, where the user is
    drawn in every step instead of every second one.
    """
    bands, steps, prob, sigma, width = 2, 5, 0.1, 1.5, 300_000
    stddev, rng = sigma * 2**20, np.random.default_rng(0)
    event = accounting.cyclic_event(sigma, prob, cap, bands)
    counts = np.zeros((steps, width), np.int64)
    for step in range(0, steps, 1 if in_every_step else bands):
        counts[step] = rng.binomial(cap, bands * prob, width)
    scale, s = 2.0 ** release_shift(stddev) / 2**20, coefficients(steps, bands)

    def losses(sums, seed):
        noise, key = Correlated(steps, bands), SecretKey.create(seed=seed)
        seen = [noise([x], stddev=stddev, key=key, step=t)[0] * scale for t, x in enumerate(sums)]
        mixed = s[0] * np.array(seen)
        mixed[1:] += s[1] * np.array(seen[:-1])  # S x + z
        blocks = [(mixed[t : t + bands].T @ s[: steps - t]) for t in range(0, steps, bands)]
        norms = [float(s[: steps - t] @ s[: steps - t]) for t in range(0, steps, bands)]
        total = np.zeros(width)
        for block, norm in zip(blocks, norms, strict=True):
            ratios = [
                math.comb(cap, k)
                * (bands * prob) ** k
                * (1 - bands * prob) ** (cap - k)
                * np.exp((k * block - k**2 * norm / 2) / sigma**2)
                for k in range(cap + 1)
            ]
            total += np.log(sum(ratios))
        return total

    present, absent = losses(counts * 2**20, 1), losses(np.zeros_like(counts), 2)
    excess = []
    for epsilon in (0.1, 0.5, 1.0, 1.5):
        for first, second, sign in ((present, absent, 1), (absent, present, -1)):
            one, other = (sign * first > epsilon).mean(), (sign * second > epsilon).mean()
            error = math.sqrt((one + math.exp(2 * epsilon) * other + 1 / width) / width)
            found = one - math.exp(epsilon) * other
            claimed = accounting.delta([(event, steps)], epsilon)
            excess.append((found - claimed) / error)
            if sign == 1 and not in_every_step and epsilon < 1:
                assert found > 0.8 * claimed - 5 * error  # and that is no slack claim
    assert (max(excess) > 20) if in_every_step else (max(excess) < 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"noise": "correlated", "bands": 2}])
def test_a_run_whose_noise_is_drawn_while_others_compute_releases_the_same(
    kind, tmp_path, monkeypatch
):
    posts = [{"user_id": f"u{i % 20}", "text": f"post {i}"} for i in range(60)]
    begun, begin, facts = [], Correlated.begin, LocalEngine.facts
    own = {"num_steps": 3, "epsilon": 8.0, "batch_size": 8, "group_size": 2, "seed": 3}
    own |= {"model": "micro", "max_length": 16, "strategy": "scan", "engine": "local"}
    own["rows_per_pass"] = 2  # the rule has others on accelerators, with other bits

    def released(name):
        place = {"run_dir": tmp_path / name, "budget_ledger": tmp_path / "budget"}
        fedsim.train("uls", posts, **place, **own, **kind, output="quiet")
        lines = (tmp_path / name / "ledger.jsonl").read_text().splitlines()
        return [json.loads(line).get("gradient_sha256") for line in lines]

    expected = released("cpu")
    monkeypatch.setattr(LocalEngine, "facts", lambda self: {**facts(self), "platform": "gpu"})
    monkeypatch.setattr(Correlated, "begin", lambda *a: begun.append(a) or begin(*a))
    assert released("gpu") == expected and len(begun) == 3 and len(set(expected)) >= 4
