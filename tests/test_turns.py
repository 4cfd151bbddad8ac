"""Cyclic sampling and random allocation: who can take part when, and what it costs."""

import json

import numpy as np
import pytest
from problems import users_of_sizes
from refused import refuses
from test_verify import command as train_command, texts, verify  # noqa: F401 (a fixture)

from fedsim import accounting
from fedsim.accounting import StepEvent, allocated_event, cyclic_event
from fedsim.cli.main import main
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, PrivacyConfig
from fedsim.els import ELS
from fedsim.keys import SecretKey
from fedsim.plan import allocated
from fedsim.run import checkpoint, ledger
from fedsim.sampling import Allocation, Cyclic, Poisson, Sampling
from fedsim.uls import ULS

STEPS, BANDS = 6000, 4


def taken_by(sampler, steps):
    """Membership of units in steps, bool [round, step of the round, units]."""
    key, taken = SecretKey.create(seed=1), np.zeros((steps, sampler.num_units), bool)
    for step in range(steps):
        taken[step, sampler.draw(key, step)] = True
    return taken.reshape(-1, BANDS, sampler.num_units)


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [True, False])
def test_a_user_takes_part_in_steps_of_one_group_alone_with_the_groups_probability(balanced):
    taken = taken_by(Cyclic(24, 3, BANDS, balanced), STEPS)
    rates = taken.mean(axis=0)  # by group and user
    assert ((rates > 0).sum(axis=0) == 1).all()
    error = np.sqrt(0.25 / (STEPS / BANDS))
    assert np.abs(rates.max(axis=0) - BANDS * 3 / 24).max() < 5 * error
    sizes = (rates > 0).sum(axis=1)
    assert sizes.sum() == 24 and (not balanced or (sizes == 6).all())
    turns = taken.sum(axis=1)  # cycles: independent of one another
    centred = turns - turns.mean(axis=0)
    successive = (centred[1:] * centred[:-1]).mean(axis=0) / centred.var(axis=0)
    assert np.abs(successive).max() < 5 / np.sqrt(STEPS / BANDS)


def test_everyone_takes_part_once_in_every_window_at_a_random_step():
    windows = STEPS // BANDS
    taken = taken_by(Allocation(30, 8, BANDS), STEPS)
    assert (taken.sum(axis=1) == 1).all()
    assert np.abs(taken.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / windows)
    first = taken[:, 0] - 0.25
    pairs = (first.T @ first / windows / (0.25 * 0.75))[np.triu_indices(30, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(windows)  # of users
    successive = (first[1:] * first[:-1]).mean(axis=0) / (0.25 * 0.75)
    assert np.abs(successive).max() < 5 / np.sqrt(windows)  # of windows


@pytest.mark.privacy
@pytest.mark.parametrize(
    "method, own", [(ULS, {}), (ELS, {"adjacency": ZERO_OUT}), (ELS, {"adjacency": ADD_OR_REMOVE})]
)
def test_no_user_takes_part_in_two_steps_of_a_cycle(method, own, key):
    users = users_of_sizes([1, 4, 9, 2, 30, 3, 0, 5] * 5)
    settings = {"batch_size": 6, "group_size": 2, "key": key, **own}
    sampling = Sampling("cyclic", BANDS, own.get("adjacency") != ADD_OR_REMOVE)
    drawn = method(users, sampling=sampling, **settings)
    rows = [drawn.draw(step).ravel() for step in range(60)]
    who = [set(np.searchsorted(users.offsets, x[x >= 0], side="right") - 1) for x in rows]
    for step in range(60):
        assert all(not who[step] & other for other in who[step + 1 : step + BANDS])
    assert any(a & b for a, b in zip(who, who[BANDS:], strict=False))


def test_nobodys_group_depends_on_whether_another_user_is_there(key):
    """With add-or-remove; with zero-out the number of users is the same for neighbours."""
    few, many = (Cyclic(n, 2, BANDS, balanced=False) for n in (20, 21))
    # The probability follows from the number of users, the groups do not.
    groups = [{u: t % BANDS for t in range(400) for u in s.draw(key, t)} for s in (few, many)]
    assert groups[0].items() <= groups[1].items() and max(groups[0]) < 20


def test_the_event_is_of_the_group_and_of_every_cycle_or_window_once():
    assert Poisson(100, 5).event(1.5) == StepEvent(1.5, 0.05, 1)
    assert Poisson(100, 5).event(1.5, max_contributions=8) == StepEvent(1.5, 0.05, 8)
    assert Cyclic(100, 5, 4).event(1.5) == StepEvent(1.5, 0.2, 1, 4)
    assert Cyclic(100, 5, 4).event(1.5, max_contributions=8) == StepEvent(1.5, 0.2, 8, 4)
    assert Cyclic(21, 3, 7).event(1.0).sampling_prob == 1.0
    assert Allocation(30, 8, 4).event(1.5) == allocated_event(1.5, 4)
    assert Allocation(30, 8, 4).sampling_prob == 0.25


def test_what_cannot_be_drawn_is_refused():
    with refuses("bands=8", says="<= 7"):
        Cyclic(23, 3, 8)
    with refuses("participations=None"):
        allocated(Algorithm.ULS, PrivacyConfig(1.0, 10, sampling="allocation"), num_users=100)


@pytest.mark.privacy
@pytest.mark.parametrize("event", [cyclic_event(1.0, 0.01, 1, 4), allocated_event(1.0, 4)])
def test_a_cycle_or_window_that_was_begun_is_paid_for(event):
    spent = [accounting.epsilon([(event, steps)], 1e-6) for steps in range(10)]
    assert spent[0] == 0 and spent[1] == spent[4] < spent[5] == spent[8] < spent[9]
    running = accounting.RunningEpsilon(event, 1e-6)
    assert [running(steps) for steps in range(10)] == pytest.approx(spent, rel=1e-3)
    # A user of two runs takes part in ceil(3 / 4) + ceil(5 / 4) cycles, not in 8 / 4.
    both = accounting.epsilon([(event, 3), (event, 5)], 1e-6)
    assert both == accounting.epsilon([(event, 12)], 1e-6)
    assert accounting.composed_loss([(event, 5)], 1e-6).get_epsilon_for_delta(1e-6) <= both


@pytest.mark.privacy
def test_a_cycle_costs_one_step_with_the_probability_of_the_group():
    one = accounting.epsilon([(cyclic_event(2.0, 0.02, 4, 3), 40)], 1e-6)
    assert one == accounting.epsilon([(StepEvent(2.0, 0.06, 4), 14)], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, flags, event",
    [
        ("els", {"sampling": "cyclic", "bands": 2}, {"cycle": 2}),
        ("uls", {"sampling": "allocation", "participations": 2}, {"allocated": True, "cycle": 3}),
        ("uls", {"sampling": "cyclic", "bands": 3, "noise": "correlated"}, {"cycle": 3}),
    ],
)
def test_a_run_is_accounted_and_verified_so(
    algorithm,
    flags,
    event,
    texts,  # noqa: F811
    run_dir,
    capsys,
):
    main([*train_command(texts, run_dir, algorithm, epsilon=8, **flags), "--json"])
    summary = json.loads(capsys.readouterr().out)
    _, number, *noise = flags
    assert summary["sampling"].items() >= {"kind": flags["sampling"], number: flags[number]}.items()
    assert summary["noise"]["kind"] == ("correlated" if noise else "independent")
    events = [line["event"] for line in ledger.steps_of(ledger.read(run_dir))]
    assert len(events) == 6 and all(event.items() <= each.items() for each in events)
    names = ["num_steps", "sampling_prob", "noise_multiplier", "delta"]
    names += ["group_size"] if algorithm == "els" else []
    own = [str(x) for n in names for x in (f"--{n.replace('_', '-')}", summary[n])]
    own += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    main(["account", algorithm, *own, "--json"])
    assert json.loads(capsys.readouterr().out)["epsilon"] == summary["epsilon"] <= 8
    for flag, steps in (("--replay", "the last 2 of 6 steps"), ("--whole", "all 6 steps")):
        code, found = verify(capsys, run_dir, flag)
        assert code == 0 and found["replay"][0] and found["draws"][0] and found["settings"][0]
        assert found["replay"][1].startswith(steps)
    state = set(checkpoint.load(checkpoint.latest(run_dir)))  # no rows of noise
    assert state <= set("params opt_state average step lost_steps clip_norm chain".split())
