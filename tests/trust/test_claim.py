"""The claim: what its sentences and curves say is never less than what holds."""

import dataclasses
import math
import re

import numpy as np
import pytest
from test_console import PLAN

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.trust import claim
from fedsim.trust.claim import Released


def released(phases, num_steps, delta=1e-5, plan=None):
    epsilon = accounting.epsilon(phases, delta)
    return Released(None, {}, plan or PLAN, [{}] * (num_steps + 1), phases, epsilon, [])


@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_nobody_recognises_more_than_the_gaussian_mechanism_allows(sigma):
    """One step with everyone: the best test is known, TPR = Phi(Phi^-1(FPR) + 1 / sigma)."""
    from scipy.stats import norm

    found = released([(StepEvent(sigma, 1.0), 1)], 1)
    for alarms in (0.001, 0.01, 0.05):
        best = norm.cdf(norm.ppf(alarms) + 1 / sigma)
        assert best <= claim.most_recognised(found, alarms) <= best * 1.2 + 0.01


def of_plan(monkeypatch, **changed):
    """What a run of a plan has released after its 20 steps."""
    monkeypatch.setattr(Released, "fingerprint", "f" * 64)
    plan = claim.Plan.from_dict({**PLAN.as_dict(), **changed})
    event = StepEvent(plan.noise_multiplier, plan.accounted_prob, plan.group_size)
    return released([(event, plan.num_steps)], plan.num_steps, plan.delta, plan)


@pytest.mark.privacy
def test_every_point_of_the_curve_has_its_own_slack():
    """delta'' = delta + d' + (e^e - 1) delta + e^(epsilon + e) d', at this epsilon and delta; at a
    small epsilon delta is larger, and so is what noise that is not ideal adds to it."""
    plan = dataclasses.replace(PLAN, num_parameters=350_000_000)
    found = released([(StepEvent(1.5, 0.1), 2_000)], 2_000, plan=plan)
    epsilons, deltas = claim.curve(found)
    ideal = np.linspace(0, 1.3 * found.epsilon, len(epsilons))
    bare = accounting.privacy_curve(found.phases, ideal)
    for number in (0, len(ideal) // 2, len(ideal) - 1):
        error = (epsilons[number] - ideal[number]) / 2
        assert error > 1e-5
        assert deltas[number] >= bare[number] * math.exp(error) * (1 - 1e-12)


@pytest.mark.parametrize("delta", [1.2301e-6, 9.991e-7, 1e-6])
def test_no_bound_in_the_sentences_is_rounded_down(delta, monkeypatch):
    found = of_plan(monkeypatch, delta=delta)
    text = claim.claim(found)
    assert float(re.search(r"epsilon = ([\d.]+)", text)[1]) >= found.epsilon
    deltas = re.findall(r"\d\.\d\de-\d+", text)
    assert len(deltas) == 2 and all(delta <= float(x) < 1.01 * delta for x in deltas)
    factor = float(re.search(r"than ([\d.,]+) times", text)[1].replace(",", ""))
    assert math.exp(found.epsilon) <= factor
    table = claim.in_words(found)[-2]
    for (_, shown), alarms in zip(table.rows, claim.FALSE_ALARMS, strict=True):
        bound = float(re.search(r"at most ([\d.]+)%", shown)[1]) / 100
        assert claim.most_recognised(found, alarms) <= bound + 1e-15


def test_a_weak_claim_is_said_to_be_one(monkeypatch):
    assert claim.warnings(of_plan(monkeypatch)) == []
    (said,) = claim.warnings(of_plan(monkeypatch, delta=1e-5))
    assert "delta times the number of users is 0.012." in said
    (said,) = claim.warnings(of_plan(monkeypatch, noise_multiplier=0.3))
    assert said == "Mind: an epsilon above 10 promises little."


@pytest.mark.parametrize(
    "label",
    [
        {"sampling_run": "shuffle"},
        {"assumed_population": 12_000},
        {"seeded": True},
        {"unproven": "bookkeeping:4"},
    ],
)
def test_what_is_no_guarantee_is_not_put_into_words(label, monkeypatch):
    found = of_plan(monkeypatch, **label)
    assert "no privacy is claimed" in claim.claim(found)
    assert claim.in_words(found) == []


@pytest.mark.privacy
def test_epsilon_after_each_step_has_the_slack_that_the_claim_has():
    plan = dataclasses.replace(PLAN, num_parameters=10**14)  # whose slack no rounding hides
    event = StepEvent(2.0, 0.05)

    def least(step):
        part = plan.slack_after(step)
        return accounting.epsilon([(event, step)], plan.delta - part.delta) + part.epsilon

    found = released([(event, 64)], 64, plan.delta, plan)
    found = dataclasses.replace(found, epsilon=least(64))  # as `report.read` has it
    steps, spent = claim.over_steps(found)
    assert (steps[-1], spent[-1]) == (64, found.epsilon) and spent == sorted(spent)
    for number in (1, 8, 15):
        at_least = least(steps[number])
        assert at_least * (1 - 1e-4) <= spent[number] <= at_least * (1 + 1e-3)
        assert plan.slack_after(steps[number]).epsilon > 1e-3 * at_least


def test_epsilon_grows_with_the_steps_up_to_the_claim(monkeypatch):
    found = of_plan(monkeypatch)
    steps, spent = claim.over_steps(found)
    assert (steps[0], steps[-1]) == (0, 20) and spent == sorted(spent)
    assert spent[-1] == pytest.approx(found.epsilon, rel=1e-3)
    epsilons, deltas = claim.curve(found)
    assert np.all(np.diff(deltas) <= 0) and epsilons[-1] > found.epsilon
