"""What several users together are promised, beside other accountants, integration and samples."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, allocated_event
from fedsim.cli.main import main
from fedsim.errors import ConfigError

pytestmark = pytest.mark.privacy
DELTA = 1e-6


def for_people(event, people, steps=1):
    return accounting.for_people([(event, steps)], people)


def test_users_spread_over_the_groups_of_a_cycle_lose_no_more_than_all_in_one_group():
    """Samples of the loss of three users in three groups, each seen in a step of its own."""
    noise, prob, epsilon, samples = 1.0, 0.3, 0.5, 400_000
    rng = np.random.default_rng(0)
    y = rng.normal(size=(samples, 3)) * noise + (rng.random((samples, 3)) < prob)
    ratio = 1 - prob + prob * np.exp((2 * y - 1) / (2 * noise**2))
    loss = np.log(ratio).sum(axis=1)
    inside = np.maximum(0, -np.expm1(epsilon - loss))
    spread, error = inside.mean(), inside.std() / math.sqrt(samples)
    together = accounting.delta(for_people(StepEvent(noise, prob), 3), epsilon)
    assert spread + 5 * error < together
    apart = accounting.delta([(StepEvent(noise, prob), 3)], epsilon)
    assert apart == pytest.approx(spread, abs=5 * error)


@pytest.mark.parametrize(
    "event", [StepEvent(1.0, 0.3), StepEvent(1.5, 0.2, 2), StepEvent(2.0, 0.2, max_changed=1)]
)
def test_samples_of_both_directions_lose_what_the_accountant_says(event):
    """Three users, two steps: sums of all that they own or change, drawn and looked at."""
    people, steps, epsilon, samples = 3, 2, 0.6, 200_000
    rng, noise, prob = np.random.default_rng(1), event.noise_multiplier, event.sampling_prob
    own, changed = people * event.max_contributions, people * event.max_changed

    def law(number, sign):
        counts = np.arange(number + 1)
        return sign * counts, stats.binom.pmf(counts, number, prob)

    def found(upper, lower):
        """The hockey-stick divergence of two laws, and its standard error."""
        drawn = rng.choice(upper[0], (samples, steps), p=upper[1])
        y = drawn + noise * rng.normal(size=drawn.shape)
        p, q = (stats.norm.pdf(y[..., None], at, noise) @ probs for at, probs in (upper, lower))
        inside = np.maximum(0, -np.expm1(epsilon - np.log(p / q).sum(axis=1)))
        return inside.mean(), inside.std() / math.sqrt(samples)

    there, absent = law(own + changed, 1), law(changed, -1)
    ways = [found(there, absent), found(absent, there)]
    ours = accounting.delta(for_people(event, people, steps), epsilon)
    assert all(ours >= value - 5 * error for value, error in ways)
    value, error = max(ways)
    assert ours == pytest.approx(value, abs=5 * error)


def test_units_of_all_are_those_of_one():
    assert for_people(PureEvent(0.1), 5) == [(PureEvent(0.5), 1)]
    assert for_people(StepEvent(1.5, 0.2, 3, 4, 2), 4) == [(StepEvent(1.5, 0.2, 12, 4, 8), 1)]


@pytest.mark.parametrize(
    "flags, how",
    [
        ("", "theorem"),
        ("--sampling cyclic --bands 4", "theorem"),
        ("--max-shared-groups 2", "theorem"),
        ("--sampling cyclic --noise correlated --bands 4", "group privacy"),
    ],
)
def test_the_command_answers_for_several_users(flags, how, capsys):
    own = "account uls --num-steps 20 --noise-multiplier 3 --sampling-prob 0.05 --delta 1e-6"
    main([*own.split(), *flags.split(), "--people", "3", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["how"] == how
    if not flags or "shared" in flags:
        event = StepEvent(3.0, 0.05, 3, max_changed=6 if flags else 0)
        assert said["epsilon"] == pytest.approx(accounting.epsilon([(event, 20)], DELTA))


def test_what_is_not_known_for_several_users_is_refused():
    event = allocated_event(1.0, 10)
    with pytest.raises(ConfigError) as error:
        for_people(event, 2)
    assert error.value.field == "people"
    assert for_people(event, 1) == [(event, 1)]
    with pytest.raises(ConfigError):
        for_people(event, 0)


@pytest.mark.parametrize("people", [2, 5])
def test_group_privacy_is_that_of_the_curve(people):
    phases = [(allocated_event(3.0, 10), 20)]
    epsilon = accounting.group_epsilon(phases, DELTA, people)
    one = accounting.epsilon(phases, DELTA)
    assert epsilon > people * one
    level = epsilon / people
    sums = sum(math.exp(i * level) for i in range(people))
    assert accounting.delta(phases, level) * sums <= DELTA


def test_what_one_user_gets_for_nothing_several_pay_for():
    """(0, delta) for one is (0, k delta) for k, and no more."""
    phases = [(StepEvent(30.0, 0.1), 1)]
    one = accounting.delta(phases, 0.0)
    assert accounting.epsilon(phases, 2 * one) == 0 < accounting.group_epsilon(phases, 2 * one, 10)
    assert accounting.group_epsilon(phases, 10.1 * one, 10) == 0
