"""The accountant against dp_accounting, closed forms, quadrature, sampling and itself."""

import csv
import dataclasses
import functools
import math
from pathlib import Path

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dp_accounting import pld
from scipy import optimize, stats
from test_mixture import exact_deltas

from fedsim import accounting
from fedsim.accounting import StepEvent, events

# Epsilons of dp_accounting 0.6.0's PLDAccountant, on the discretization of each row, and, where its
# double precision shows (further than 1e-8 from us), of its one-step loss composed in extended
# precision. When the library changes: run -m slow, see which rows differ, and record them anew.
with (Path(__file__).parent / "recorded_epsilons.csv").open(newline="") as file:
    RECORDED = list(csv.DictReader(file))


def library_epsilon(event, num_steps, delta, grid):
    accountant = pld.PLDAccountant(value_discretization_interval=grid)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event.to_dp_event(), num_steps))
    return accountant.get_epsilon(delta)


def recorded(row):
    """(event, steps, delta), the library's epsilon, and the one without its rounding."""
    sigma, prob = float(row["noise_multiplier"]), float(row["sampling_prob"])
    event = StepEvent(sigma, prob, int(row["max_contributions"]))
    library = float(row["library_epsilon"])
    setting = (event, int(row["num_steps"]), float(row["delta"]))
    return setting, library, float(row["wide_epsilon"] or library)


@functools.cache
def same_grid_epsilon(setting, grid):
    event, steps, delta = setting
    return accounting.epsilon([(event, steps)], delta, discretization=float(grid))


def name(row):
    return "-".join(list(row.values())[:5])


@pytest.mark.parametrize("row", RECORDED, ids=name)
def test_same_grid_as_dp_accounting_gives_its_epsilon(row):
    setting, library, wide = recorded(row)
    event, steps, delta = setting
    epsilon = same_grid_epsilon(setting, row["discretization"])
    # In double precision the library's FFT errs either way; the wide value is without that error.
    # Where e^-epsilon underflows it returns the loss above which delta lies: about one too much.
    below = 1e-6 if library < 700 else 1 / library
    assert -below <= epsilon / wide - 1 <= 1e-4
    if library < 700:
        grid = float(row["discretization"])
        at_library = accounting.delta([(event, steps)], library, discretization=grid)
        assert at_library == pytest.approx(delta, rel=1e-4, abs=1e-15 + 1e-15 * steps)


def test_sixty_settings_over_all_ranges_agree_with_dp_accounting_as_it_is():
    """With what PLDAccountant.get_epsilon said, rounding and all: no extended precision here."""
    agreeing = []
    for row in RECORDED:
        setting, library, _ = recorded(row)
        epsilon = same_grid_epsilon(setting, row["discretization"])
        if -1e-6 <= epsilon / library - 1 <= 1e-4:
            agreeing.append(row)
    assert len(agreeing) >= 60
    for field, low, high in (
        ("max_contributions", 1, 128),
        ("sampling_prob", 1e-5, 0.5),
        ("num_steps", 1, 10_000),
        ("noise_multiplier", 0.5, 10),
        ("delta", 1e-12, 1e-3),
    ):
        values = [float(row[field]) for row in agreeing]
        assert (min(values), max(values)) == (low, high), field


@pytest.mark.slow
@pytest.mark.parametrize("row", RECORDED, ids=name)
def test_recorded_values_are_still_what_dp_accounting_says(row):
    setting, library, _ = recorded(row)
    assert library_epsilon(*setting, float(row["discretization"])) == pytest.approx(
        library, rel=1e-9
    )


@pytest.mark.parametrize("prob, sigma, steps", [(0.01, 1.0, 1000), (0.5, 4.0, 50), (1.0, 8.0, 10)])
def test_one_contribution_is_the_poisson_sampled_gaussian(prob, sigma, steps):
    """Theorem 2 is Theorem 1 at G = 1, and to_dp_event says so to the library."""
    event = StepEvent(sigma, prob)
    assert isinstance(event.to_dp_event(), dp_accounting.PoissonSampledDpEvent)
    library = library_epsilon(event, steps, 1e-7, 1e-4)
    assert accounting.epsilon([(event, steps)], 1e-7) == pytest.approx(library, rel=2e-4)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-11])
@pytest.mark.parametrize("group, sigma, steps", [(1, 10.0, 100), (4, 30.0, 25), (16, 5.0, 1)])
def test_everyone_every_step_is_the_gaussian_mechanism(group, sigma, steps, delta):
    ratio = group * math.sqrt(steps) / sigma

    def exact(epsilon):
        upper = stats.norm.cdf(ratio / 2 - epsilon / ratio)
        return upper - math.exp(epsilon + stats.norm.logcdf(-ratio / 2 - epsilon / ratio))

    epsilon = accounting.epsilon([(StepEvent(sigma, 1.0, group), steps)], delta)
    truth = optimize.brentq(lambda e: exact(e) - delta, 0, 500)
    assert truth <= epsilon <= truth * (1 + 2e-4)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("setting", [(1.0, 1, 0.01), (1.0, 1, 1e-5), (2.0, 8, 0.3), (1.0, 8, 1e-3)])
def test_one_step_is_the_integral(setting, delta):
    sigma, group, prob = setting

    def excess(epsilon):
        return max(exact_deltas(sigma, group, prob, epsilon)) - delta

    epsilon = accounting.epsilon([(StepEvent(sigma, prob, group), 1)], delta)
    truth = optimize.brentq(excess, 0, 100, xtol=1e-13, rtol=1e-12) if excess(0) > 0 else 0.0
    assert truth * (1 - 1e-9) <= epsilon <= truth * (1 + 5e-4)


@pytest.mark.parametrize("group, sigma, prob, steps", [(4, 2.0, 0.1, 20), (1, 1.0, 0.05, 50)])
def test_sampled_losses_give_a_lower_bound(group, sigma, prob, steps, rng):
    counts = np.arange(group + 1)
    probs = stats.binom.pmf(counts, group, prob)

    def losses(drawn):
        terms = probs * np.exp((drawn[..., None] * counts - counts**2 / 2) / sigma**2)
        return np.log(terms.sum(-1)).sum(-1)

    noise = rng.normal(0, sigma, (20_000, steps))
    remove = losses(noise + rng.binomial(group, prob, noise.shape))
    add = -losses(noise)
    for target in (0.1, 0.01):
        epsilon = float(np.quantile(remove, 1 - target))
        bound = accounting.delta([(StepEvent(sigma, prob, group), steps)], epsilon)
        for sampled in (remove, add):
            gains = np.maximum(0, -np.expm1(epsilon - sampled))
            assert gains.mean() - 4 * gains.std() / math.sqrt(gains.size) <= bound
        gains = np.maximum(0, -np.expm1(epsilon - remove))
        assert bound <= gains.mean() + 4 * gains.std() / math.sqrt(gains.size)


EVENTS = st.builds(
    StepEvent,
    noise_multiplier=st.floats(0.6, 10),
    sampling_prob=st.floats(1e-4, 0.9),
    max_contributions=st.integers(1, 24),
)


@pytest.mark.slow
@pytest.mark.ci
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(event=EVENTS, steps=st.integers(1, 300), log_delta=st.floats(-22, -5))
def test_epsilon_is_monotone_in_every_argument(event, steps, log_delta):
    """On one grid exactly, up to rounding: connecting the dots keeps the order of two curves."""

    def epsilon(event=event, steps=steps, log_delta=log_delta):
        return accounting.epsilon([(event, steps)], math.exp(log_delta), discretization=2**-5)

    changed = dataclasses.replace
    base = epsilon() * (1 + 1e-9) + 1e-12
    assert epsilon(changed(event, noise_multiplier=event.noise_multiplier * 1.05)) <= base
    assert epsilon(changed(event, sampling_prob=event.sampling_prob * 0.95)) <= base
    assert epsilon(changed(event, max_contributions=max(1, event.max_contributions - 1))) <= base
    assert epsilon(steps=max(1, steps - 1)) <= base
    assert epsilon(log_delta=log_delta + 0.1) <= base


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(event=EVENTS, steps=st.integers(1, 300))
def test_delta_undoes_epsilon(event, steps):
    phases = [(event, steps)]
    epsilon = accounting.epsilon(phases, 1e-6)
    if epsilon > 0:
        assert accounting.delta(phases, epsilon) == pytest.approx(1e-6, rel=2e-2)


def test_privacy_curve_falls_and_agrees_with_epsilon():
    phases = [(StepEvent(1.0, 0.02, 4), 300)]
    epsilons = np.linspace(0, 12, 25)
    curve = accounting.privacy_curve(phases, epsilons)
    assert curve.shape == (25,)
    assert np.all(np.diff(curve) < 0)
    assert accounting.epsilon(phases, float(curve[10])) == pytest.approx(epsilons[10], rel=1e-3)
    assert accounting.privacy_curve(phases, []).shape == (0,)


def test_nothing_released_costs_nothing():
    assert accounting.epsilon([], 1e-6) == 0.0
    assert accounting.epsilon([(StepEvent(1.0, 0.1), 0)], 1e-6) == 0.0
    assert accounting.delta([], 0.0) == 0.0
    assert accounting.RunningEpsilon(StepEvent(1.0, 0.1), 1e-6)(0) == 0.0


def test_running_epsilon_follows_epsilon():
    event = StepEvent(1.0, 0.01, 8)
    running = accounting.RunningEpsilon(event, 1e-6)
    values = [running(steps) for steps in range(10, 410, 10)]
    assert np.all(np.diff(values) > 0)
    for steps in (10, 150, 400):
        exact = accounting.epsilon([(event, steps)], 1e-6)
        assert running(steps) == pytest.approx(exact, rel=3e-4)


@pytest.mark.parametrize(
    "field, value, expectation",
    [
        ("noise_multiplier", 0.0, r"in \[1e-10, 1e\+10\]"),
        ("noise_multiplier", -1.0, r"in \[1e-10, 1e\+10\]"),
        ("noise_multiplier", math.nan, r"in \[1e-10, 1e\+10\]"),
        ("noise_multiplier", math.inf, r"in \[1e-10, 1e\+10\]"),
        ("sampling_prob", 0.0, r"in \(0, 1\]"),
        ("sampling_prob", 1.5, r"in \(0, 1\]"),
        ("max_contributions", 0, "a whole number >= 1"),
        ("max_contributions", 2.5, "a whole number >= 1"),
    ],
)
def test_step_event_refuses(field, value, expectation):
    with pytest.raises(ValueError, match=f"{field}={value}: expected .*{expectation}"):
        dataclasses.replace(StepEvent(1.0, 0.1, 2), **{field: value})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: accounting.epsilon([(e, 10)], 0.0), r"delta=0.0: expected in \(0, 1\)"),
        (lambda e: accounting.epsilon([(e, 10)], 1.0), r"delta=1.0: expected in \(0, 1\)"),
        (
            lambda e: accounting.epsilon([(e, -1)], 0.1),
            "num_steps=-1: expected a whole number >= 0",
        ),
        (lambda e: accounting.epsilon([(e, 1.5)], 0.1), "num_steps=1.5: expected a whole number"),
        (lambda e: accounting.delta([(e, 10)], -1.0), "epsilon=-1.0: expected >= 0"),
        (
            lambda e: accounting.epsilon([(e, 1)], 0.1, discretization=-1.0),
            "discretization=-1.0: expected",
        ),
        (lambda e: accounting.RunningEpsilon(e, 2.0), "delta=2.0: expected"),
        (
            lambda e: accounting.noise_multiplier(
                epsilon=1.0, delta=1e-6, num_steps=0, sampling_prob=0.1
            ),
            "num_steps=0: expected a whole number >= 1",
        ),
        (
            lambda e: accounting.noise_multiplier(
                epsilon=0.0, delta=1e-6, num_steps=1, sampling_prob=0.1
            ),
            "epsilon=0.0: expected > 0",
        ),
    ],
)
def test_calls_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(StepEvent(1.0, 0.1))


def test_delta_below_what_is_resolved_is_infinite_not_wrong():
    assert accounting.epsilon([(StepEvent(1.0, 0.1), 100)], 1e-16) == math.inf


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("sigma", "prob", "steps"),
    [
        pytest.param(1e10, 1.0, 10**4, marks=pytest.mark.ci),
        pytest.param(1e10, 1e-3, 10**4, marks=pytest.mark.ci),
        pytest.param(10.0, 1e-12, 10**4, marks=pytest.mark.ci),
        pytest.param(1e-3, 1.0, 1, marks=pytest.mark.ci),
        pytest.param(1e4, 1e-9, 1, marks=pytest.mark.ci),
        (1e10, 1e-3, events.MAX_STEPS),
        (1.0, 1e-4, events.MAX_STEPS),
    ],
)
def test_there_is_an_answer_at_the_bounds_of_what_is_accounted_for(sigma, prob, steps):
    """About that of one Gaussian mechanism where the noise is large, by the central limit."""
    found = accounting.epsilon([(StepEvent(sigma, prob), steps)], 1e-11)
    mu = prob * math.sqrt(steps * math.expm1(min(sigma**-2.0, 500)))
    assert 0 <= found < math.inf
    if sigma >= 1:
        assert found == pytest.approx(accounting.gaussian_epsilon(mu, 1e-11), rel=0.05, abs=1e-9)
