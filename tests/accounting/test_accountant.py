"""The accountant against dp_accounting, closed forms, quadrature, sampling and itself."""

import csv
import dataclasses
import functools
import json
import math
from pathlib import Path

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dp_accounting import pld
from refused import refuses
from scipy import optimize, stats

from experiments.benchmarks.accounting import dp_event_of
from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, events, of_words, to_words

# Epsilons of dp_accounting 0.6.0's PLDAccountant, on the discretization of each row, and, where its
# double precision shows (further than 1e-8 from us), of its one-step loss composed in extended
# precision. When the library changes: run -m slow, see which rows differ, and record them anew.
with (Path(__file__).parent / "recorded_epsilons.csv").open(newline="") as file:
    RECORDED = list(csv.DictReader(file))


ONE = [(StepEvent(1.0, 0.1), 10)]
TARGET = {"epsilon": 1.0, "delta": 1e-6, "num_steps": 1, "sampling_prob": 0.1}
MANY = {**TARGET, "delta": 1e-14, "num_steps": 10**5}


def library_epsilon(event, num_steps, delta, grid):
    accountant = pld.PLDAccountant(value_discretization_interval=grid)
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_event_of(event), num_steps))
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


def test_privacy_curve_falls_and_agrees_with_epsilon():
    phases = [(StepEvent(1.0, 0.02, 4), 300)]
    epsilons = np.linspace(0, 12, 25)
    curve = accounting.privacy_curve(phases, epsilons)
    assert curve.shape == (25,)
    assert np.all(np.diff(curve) < 0)
    assert accounting.epsilon(phases, float(curve[10])) == pytest.approx(epsilons[10], rel=1e-3)
    assert accounting.privacy_curve(phases, []).shape == (0,)
    assert accounting.delta([(StepEvent(1.0, 0.02), 1)], 600.0) == 1e-15  # none is resolved below


def test_nothing_released_costs_nothing():
    assert accounting.epsilon([], 1e-6) == 0.0
    assert accounting.epsilon([(StepEvent(1.0, 0.1), 0)], 1e-6) == 0.0
    assert accounting.delta([], 0.0) == 0.0
    assert accounting.RunningEpsilon(StepEvent(1.0, 0.1), 1e-6)(0) == 0.0


@pytest.mark.parametrize(
    "what, call",
    [
        ("noise_multiplier=0.0", lambda: StepEvent(0.0, 0.1)),
        ("noise_multiplier=nan", lambda: StepEvent(math.nan, 0.1)),
        ("noise_multiplier=inf", lambda: StepEvent(math.inf, 0.1)),
        ("noise_multiplier=1000.0", lambda: StepEvent(1000.0, 1e-11)),
        ("sampling_prob=0.0", lambda: StepEvent(1.0, 0.0)),
        ("sampling_prob=1.5", lambda: StepEvent(1.0, 1.5)),
        ("max_contributions=0", lambda: StepEvent(1.0, 0.1, 0)),
        ("max_contributions=2.5", lambda: StepEvent(1.0, 0.1, 2.5)),
        ("delta=0.0", lambda: accounting.epsilon(ONE, 0.0)),
        ("delta=1.0", lambda: accounting.epsilon(ONE, 1.0)),
        ("num_steps=-1", lambda: accounting.epsilon([(ONE[0][0], -1)], 0.1)),
        ("num_steps=1.5", lambda: accounting.epsilon([(ONE[0][0], 1.5)], 0.1)),
        ("epsilon=-1.0", lambda: accounting.delta(ONE, -1.0)),
        ("discretization=-1.0", lambda: accounting.epsilon(ONE, 0.1, discretization=-1.0)),
        ("delta=2.0", lambda: accounting.RunningEpsilon(ONE[0][0], 2.0)),
        ("num_steps=0", lambda: accounting.noise_multiplier(**{**TARGET, "num_steps": 0})),
        ("delta=9e-16", lambda: accounting.noise_multiplier(**{**TARGET, "delta": 9e-16})),
        ("delta=1e-14", lambda: accounting.noise_multiplier(**MANY)),
        ("epsilon=0.0", lambda: accounting.noise_multiplier(**{**TARGET, "epsilon": 0.0})),
    ],
)
def test_what_is_no_event_or_question_is_refused(what, call):
    with refuses(what):
        call()


def test_events_are_read_as_they_are_written():
    phases = [(StepEvent(1.25, 0.1, 4), 30), (PureEvent(0.5), 1)]
    assert of_words(json.loads(json.dumps(to_words(phases)))) == phases
    kind = {"kind": "PureEvent", "epsilon": 1.0}
    for wrong in ({"kind": "X"}, 1), ({**kind, "epsilon": -1.0}, 1), (kind, -1), (kind, True):
        with pytest.raises((KeyError, ValueError)):
            of_words([wrong])


def test_delta_below_what_is_resolved_is_infinite_not_wrong():
    assert accounting.epsilon([(StepEvent(1.0, 0.1), 100)], 1e-16) == math.inf


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("sigma", "prob", "steps"),
    [
        (1e10, 1.0, 10**4),
        (10.0, 1e-12, 10**4),
        (1e-3, 1.0, 1),
        (1e4, 1e-9, 1),
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
