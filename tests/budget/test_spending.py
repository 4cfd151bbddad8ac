"""What runs have spent together: against dp_accounting, and for the person who pays most."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from experiments.benchmarks.accounting import dp_event_of
from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget.ledger import Entry, Limit
from fedsim.budget.spending import SET_ASIDE, Account, RunCost, set_aside, total

DELTA = 1e-6
ULS, ELS, ODD = StepEvent(1.5, 0.05), StepEvent(2.5, 0.02, 6), StepEvent(6.0, 1.0)
RUNS = ([(ULS, 60)], [(ELS, 40)], [(ODD, 2)])


def charge(number, planned, *, released=(), users="all", label="", slack=(0.0, 0.0)):
    entry = Entry(number, f"run {number}", "train", "", users, label, planned, slack)
    return RunCost(entry, planned if released == () else released)


def charges(runs=RUNS):
    return [charge(number, run) for number, run in enumerate(runs, 1)]


@pytest.mark.slow
@pytest.mark.privacy
def test_runs_of_any_kind_compose_as_in_dp_accounting():
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
    )
    for event, count in (phase for run in RUNS for phase in run):
        accountant.compose(dp_event_of(event), count)
    expected, found = accountant.get_epsilon(DELTA), total(charges(), DELTA)
    assert found.fixed == pytest.approx(expected, rel=2e-3)
    alone = sum(accounting.epsilon(run, DELTA) for run in RUNS)
    assert found.fixed < found.adaptive < 1.1 * found.fixed < 0.7 * alone


@pytest.mark.privacy
def test_a_run_that_was_stopped_counts_whole_where_one_may_have_looked():
    half = [(ULS, 30)]
    stopped = [charge(1, RUNS[1]), charge(2, RUNS[0], released=half)]
    whole = [charge(1, RUNS[1]), charge(2, RUNS[0])]
    found, all_of_it = total(stopped, DELTA), total(whole, DELTA)
    assert found == all_of_it and found.fixed > accounting.epsilon([*RUNS[1], *half], DELTA)
    nothing = [charge(1, RUNS[1]), charge(2, RUNS[0], released=[])]
    assert total(nothing, DELTA) == total(whole[:1], DELTA)


@pytest.mark.privacy
@pytest.mark.parametrize("changed", [{"label": "of a seed"}, {"released": None}])
def test_what_promises_nothing_bounds_nothing(changed):
    found = total([charge(1, RUNS[0]), charge(2, RUNS[1], **changed)], DELTA)
    assert found.fixed == found.adaptive == math.inf


@pytest.mark.privacy
def test_slack_and_tails_are_paid_for():
    plain, slack = charges(), (0.01, DELTA / 100)
    with_slack = [
        dataclasses.replace(each, entry=dataclasses.replace(each.entry, slack=slack))
        for each in plain[:2]
    ]
    found, less = total(with_slack, DELTA), total(plain[:2], DELTA - 2 * DELTA / 100)
    more, missed = accounting.together([slack, slack], less.fixed, DELTA)
    assert more > 0.02 and missed > 2 * DELTA / 100  # each has the factor of all runs' epsilon
    assert found.fixed >= less.fixed + more
    assert found.fixed == accounting.epsilon_with([slack, slack], [*RUNS[0], *RUNS[1]], DELTA)
    assert found.adaptive > total(plain[:2], DELTA).adaptive + 0.02
    assert sum(set_aside(DELTA, number) for number in range(1, 1000)) <= 0.1 * DELTA


@pytest.mark.privacy
@pytest.mark.parametrize("number", [2, 3])
def test_what_is_set_aside_does_not_depend_on_how_many_runs_there_are(number):
    """Else how much mu^2 is left would depend on that, and one could choose by the first outcome
    between few large runs and many small ones."""
    mus = [accounting.gaussian_mu(RUNS[n - 1], set_aside(DELTA, n)) for n in range(2, number + 1)]
    first = [*RUNS[0], (StepEvent(1 / math.hypot(*mus), 1.0), 1)]
    left = DELTA - SET_ASIDE * DELTA
    assert total(charges()[:number], DELTA).adaptive == accounting.epsilon(first, left)


@pytest.mark.privacy
def test_everybody_pays_for_the_runs_that_saw_them():
    own = [charge(1, RUNS[0], users="old"), charge(2, RUNS[1], users="new")]
    people = np.arange(10, dtype=np.uint64)
    apart = {"old": people[:5], "new": people[5:]}
    grown = {"old": people[:5], "new": people}
    alone = [accounting.epsilon(run, DELTA) for run in RUNS[:2]]
    assert Account.of(people, own, apart).total(DELTA).fixed == max(alone)
    together = accounting.epsilon([*RUNS[0], *RUNS[1]], DELTA)
    assert Account.of(people, own, grown).total(DELTA).fixed == together
    assert Account.of(people[5:], own, grown).total(DELTA).fixed == alone[1]
    assert Account.of(people + np.uint64(10), own, grown).total(DELTA).fixed == 0


@pytest.mark.privacy
def test_a_limit_of_some_users_binds_them_alone():
    """What others spent, or what has no guarantee for them, takes nothing from these users."""
    people = np.arange(10, dtype=np.uint64)
    sets = {"all": people, "old": people[:6], "new": people[4:]}
    alone = accounting.epsilon(RUNS[0], DELTA)
    limit, own = Limit(1.5 * alone, DELTA, "old"), charge(1, RUNS[0], users="old")
    others = charge(2, None, users="new", released=None)
    apart = {**sets, "new": people[6:]}
    books = Account.of(people, [own, others], apart, [limit])
    assert math.isinf(books.total(DELTA).adaptive)
    assert books.under(limit).total(DELTA).adaptive == alone
    assert books.under(limit).charges == [own] and books.broken_by(own) is None
    mixed = Account.of(people, [own, others], sets, [limit])  # users 4 and 5 are in both
    assert mixed.broken_by(own) == limit
