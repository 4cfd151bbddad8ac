"""The claim: what its sentences and curves say is never less than what holds."""

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_console import PLAN

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.config import DataConfig, RunConfig
from fedsim.trust import claim
from fedsim.trust.claim import Released, facts
from fedsim.trust.report import as_markdown, compose


def released(phases, num_steps, delta=1e-5, plan=None):
    epsilon = accounting.epsilon(phases, delta)
    about = {"plan": plan or PLAN, "lines": [{}, *[{"step": 0}] * num_steps], "phases": phases}
    about |= {"epsilon": epsilon, "fingerprint": "f" * 64}
    return Released(**about, run_dir=None, stored=None, checks=[])


@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_nobody_recognises_more_than_the_gaussian_mechanism_allows(sigma):
    """One step with everyone: the best test is known, TPR = Phi(Phi^-1(FPR) + 1 / sigma)."""
    from scipy.stats import norm

    found = released([(StepEvent(sigma, 1.0), 1)], 1)
    for alarms in (0.001, 0.01, 0.05):
        best = norm.cdf(norm.ppf(alarms) + 1 / sigma)
        assert best <= claim.max_true_positives(found, alarms) <= best * 1.2 + 0.01


def of_plan(**changed):
    """What a run of a plan has released after its 20 steps."""
    plan = claim.Plan.from_dict({**PLAN.as_dict(), **changed})
    event = StepEvent(plan.noise_multiplier, plan.sampling.prob, plan.group_size)
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


def in_words(found, run_dir):
    """The report of what was claimed, as Markdown; with a run directory that holds no summary."""
    stored = SimpleNamespace(
        run=RunConfig(data=DataConfig("texts"), run_dir=run_dir),
        strategy={},
        identity=SimpleNamespace(model=None),
        versions={},
    )
    lines = [{"head": {"config_sha256": "0"}}] + [{"step": 0, "chain": "0"}] * found.num_released
    found = dataclasses.replace(found, run_dir=run_dir, stored=stored, lines=lines)
    return as_markdown("report.md.jinja", **compose(found))


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1.2301e-6, 9.991e-7, 1e-6])
def test_no_bound_in_the_sentences_is_rounded_down(delta, tmp_path):
    found = of_plan(delta=delta)
    text = claim.claim(found)
    assert float(re.search(r"epsilon = ([\d.]+)", text)[1]) >= found.epsilon
    deltas = re.findall(r"\d\.\d\de-\d+", text)
    assert len(deltas) == 2 and all(delta <= float(x) < 1.01 * delta for x in deltas)
    factor = float(re.search(r"outcome by at most ([\d.,]+) and", text)[1].replace(",", ""))
    assert math.exp(found.epsilon) <= factor
    table = in_words(found, tmp_path)
    rows = re.findall(r"^\| ([\d.]+)% .* at most ([\d.]+)% \|$", table, re.MULTILINE)
    assert [float(alarms) for alarms, _ in rows] == [100 * f for f in claim.FALSE_ALARMS]
    for (_, shown), alarms in zip(rows, claim.FALSE_ALARMS, strict=True):
        assert claim.max_true_positives(found, alarms) <= float(shown) / 100 + 1e-15


def test_what_is_no_guarantee_is_not_put_into_words(tmp_path):
    found = of_plan(seeded=True)
    assert "no privacy is claimed" in claim.claim(found)
    assert claim.attack_bounds(found) == [] and "recognises" not in in_words(found, tmp_path)


def rows_of(found):
    """The table of what was done, as {item: what is said of it}."""
    text = as_markdown("items.md.jinja", **facts(found), subject="this run")
    cells = [re.fullmatch(r"\| (.*?) \| (.*) \|", line).groups() for line in text.splitlines()]
    assert cells[0] == ("item", "this run") and len(dict(cells)) == len(cells)
    return dict(cells[2:])


SHARED = {"kept": 900, "max_changed": 3}
CYCLIC = {"sampling": {**PLAN.as_dict()["sampling"], "kind": "cyclic"}}
CYCLIC["sampling"]["bands"] = 3
CHOSEN = {"fact": "chosen-on-data", "of": "clip_norm"}
ALLOCATED = {"sampling": {"kind": "allocation", "prob": 0.007, "participations": 2}}


@pytest.mark.parametrize(
    "changed, item, words",
    [
        ({"algorithm": "uls"}, "accountant", "a Gaussian, sampled with probability 0.007111 "),
        ({"algorithm": "els", "group_size": 4}, "accountant", "Binomial(4, 0.007111)"),
        (ALLOCATED, "accountant", "in one of every 10 steps"),
        (CYCLIC, "accountant", "0.02133) (Theorem 1), in at most one of every 3 successive"),
        ({"algorithm": "uls", "shared": SHARED}, "accountant", "removes one and changes 3 "),
        ({"shared": SHARED}, "adjacency", "who owns which are the same, and public"),
        ({"adjacency": "add-or-remove"}, "adjacency", "one user with all texts, added or removed"),
        ({"non_private": [CHOSEN]}, "tuning of settings", "clip_norm (chosen by loo"),
    ],
)
def test_what_was_done_follows_from_the_plan(changed, item, words, tmp_path):
    found = dataclasses.replace(of_plan(**changed), run_dir=tmp_path)
    assert words in rows_of(found)[item]
