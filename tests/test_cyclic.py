"""Cyclic Poisson sampling: who can take part when, and what it costs."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from problems import users_of_sizes
from refused import refuses
from test_verify import command as train_command, texts, verify  # noqa: F401 (a fixture)

from fedsim import accounting
from fedsim.accounting import StepEvent, cyclic_event
from fedsim.cli.main import main
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT
from fedsim.els import ELS
from fedsim.keys import SecretKey
from fedsim.run import ledger
from fedsim.sampling import Cyclic, Sampling
from fedsim.uls import ULS

STEPS, BANDS = 6000, 4
SIZES = [1, 4, 9, 2, 30, 3, 0, 5]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("balanced", [True, False])
def test_a_user_takes_part_in_steps_of_one_group_alone_with_the_groups_probability(balanced):
    key, sampler = SecretKey.create(seed=1), Cyclic(24, 3, BANDS, balanced)
    taken = np.zeros((STEPS, 24), bool)
    for step in range(STEPS):
        taken[step, sampler.draw(key, step)] = True
    rates = taken.reshape(-1, BANDS, 24).mean(axis=0)  # by group and user
    assert ((rates > 0).sum(axis=0) == 1).all()
    error = np.sqrt(0.25 / (STEPS / BANDS))
    assert np.abs(rates.max(axis=0) - BANDS * 3 / 24).max() < 5 * error
    sizes = (rates > 0).sum(axis=1)
    assert sizes.sum() == 24 and (not balanced or (sizes == 6).all())
    turns = taken.reshape(-1, BANDS, 24).sum(axis=1)  # cycles: independent of one another
    centred = turns - turns.mean(axis=0)
    successive = (centred[1:] * centred[:-1]).mean(axis=0) / centred.var(axis=0)
    assert np.abs(successive).max() < 5 / np.sqrt(STEPS / BANDS)


@pytest.mark.parametrize("adjacency", [ZERO_OUT, ADD_OR_REMOVE])
def test_all_examples_of_a_user_are_in_one_group(key, adjacency):
    offsets = users_of_sizes(SIZES).offsets
    sampling = Sampling("cyclic", BANDS, adjacency == ZERO_OUT)
    own = {"batch_size": 3, "group_size": 3, "key": key, "adjacency": adjacency}
    els = ELS(users_of_sizes(SIZES), sampling=sampling, **own)
    groups = [set() for _ in SIZES]
    for step in range(400):
        for row in els.draw(step)[els.draw(step) >= 0]:
            user = np.searchsorted(offsets, row, side="right") - 1
            groups[user].add(step % BANDS)
    assert {len(each) for each, size in zip(groups, SIZES, strict=True) if size} == {1}


def test_nobodys_group_depends_on_whether_another_user_is_there(key):
    """With add-or-remove; with zero-out the number of users is the same for neighbours."""
    few, many = (Cyclic(n, 2, BANDS, balanced=False) for n in (20, 21))
    for step in range(200):
        # The probability follows from the number of users, the groups do not.
        assert set(few.draw(key, step)) <= set(range(20))
    groups = [{u: t % BANDS for t in range(400) for u in s.draw(key, t)} for s in (few, many)]
    assert groups[0].items() <= groups[1].items()


def test_groups_do_not_change_between_versions():
    """Golden; see test_sampling.py."""
    sampler = Cyclic(1000, 5, 10)
    assert sampler.draw(SecretKey.create(seed=0), 3).tolist() == [315, 596, 784, 875, 940]


def test_the_event_is_of_the_group_and_of_every_cycle_once():
    assert Cyclic(100, 5, 4).event(1.5) == StepEvent(1.5, 0.2, 1, 4)
    assert Cyclic(100, 5, 4).event(1.5, max_contributions=8) == StepEvent(1.5, 0.2, 8, 4)
    assert Cyclic(21, 3, 7).event(1.0).sampling_prob == 1.0


def test_more_groups_than_a_step_can_be_drawn_from_are_refused():
    with refuses("bands=8", says="<= 7"):
        Cyclic(23, 3, 8)


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize(
    "cap, sigma, prob, bands, steps", [(1, 1.1, 0.01, 8, 100), (4, 2.0, 0.02, 3, 40)]
)
def test_epsilon_is_dp_accountings_of_one_event_for_each_cycle(cap, sigma, prob, bands, steps):
    step = StepEvent(sigma, bands * prob, cap)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    blocks = dp_accounting.SelfComposedDpEvent(step.to_dp_event(), math.ceil(steps / bands))
    accountant.compose(blocks)
    event = cyclic_event(sigma, prob, cap, bands)
    found = accounting.epsilon([(event, steps)], 1e-6, discretization=1e-3)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-6)


@pytest.mark.privacy
def test_a_cycle_that_was_begun_is_paid_for():
    event = cyclic_event(1.0, 0.01, 1, 4)
    spent = [accounting.epsilon([(event, steps)], 1e-6) for steps in range(10)]
    assert spent[0] == 0 and spent[1] == spent[4] < spent[5] == spent[8] < spent[9]
    running = accounting.RunningEpsilon(event, 1e-6)
    assert [running(steps) for steps in range(10)] == pytest.approx(spent, rel=1e-3)


@pytest.mark.privacy
def test_two_runs_cycles_are_not_taken_for_one():
    """A user of two runs takes part in ceil(3 / 4) + ceil(5 / 4) cycles, not in 8 / 4."""
    event = cyclic_event(1.0, 0.01, 1, 4)
    both = accounting.epsilon([(event, 3), (event, 5)], 1e-6)
    assert both == accounting.epsilon([(event, 12)], 1e-6)
    assert accounting.composed_loss([(event, 5)], 1e-6).get_epsilon_for_delta(1e-6) <= both


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_accounted_verified_and_reported_so(texts, run_dir, capsys):  # noqa: F811
    algorithm = "els"
    flags = {"sampling": "cyclic", "bands": 2, "epsilon": 8}
    main([*train_command(texts, run_dir, algorithm, **flags), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["sampling"]["kind"] == "cyclic"
    assert summary["sampling"]["bands"] == 2 and summary["epsilon_holds"].startswith("zero out")
    events = [line["event"] for line in ledger.steps_of(ledger.read(run_dir))]
    assert len(events) == 6 and {event["cycle"] for event in events} == {2}
    assert events[0]["sampling_prob"] == 2 * summary["sampling_prob"]
    names = ("num_steps", "sampling_prob", "noise_multiplier", "group_size", "delta")
    own = [str(x) for n in names for x in (f"--{n.replace('_', '-')}", summary[n])]
    own += ["--bands", str(summary["sampling"]["bands"])]
    main(["account", algorithm, *own, "--sampling", "cyclic", "--json"])
    assert json.loads(capsys.readouterr().out)["epsilon"] == summary["epsilon"] <= 8
    code, found = verify(capsys, run_dir, "--whole")
    assert code == 0 and found["replay"][0] and found["draws"][0]
    assert "in one of 2 successive steps" in found["events"][1]
    main(["report", str(run_dir)])
    assert "--sampling cyclic --bands 2" in (run_dir / "report.md").read_text()


@pytest.mark.privacy
@pytest.mark.parametrize("method", [ELS, ULS])
def test_no_user_takes_part_in_two_steps_of_a_cycle(method, key):
    users, own = users_of_sizes([4] * 40), {"batch_size": 8, "group_size": 2, "key": key}
    drawn = method(users, sampling=Sampling("cyclic", BANDS), **own)
    who = [set(drawn.draw(step)[:, 0] // 4) for step in range(60)]
    for step in range(60):
        assert all(not who[step] & other for other in who[step + 1 : step + BANDS])
    assert any(a & b for a, b in zip(who, who[BANDS:], strict=False))
