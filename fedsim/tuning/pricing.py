"""The price of a private selection, computed before any trial runs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim import accounting
from fedsim.accounting import Events, SelectionEvent, StepEvent, at_most, calibration, spent
from fedsim.config import Algorithm, PrivacyConfig, RunConfig
from fedsim.data import Dataset
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.models import PRESETS
from fedsim.noise import slack
from fedsim.plan import (
    MAX_PARAMETERS,
    TWO_HELD_OUT,
    Stated,
    delta_of,
    fill_defaults,
    in_words,
    make_plan,
    method_for,
    noise_of,
    planned_phases,
)
from fedsim.run import directory
from fedsim.sampling import graph_of
from fedsim.training import facts_of_start, runnable

METRIC = "eval/loss"


@dataclasses.dataclass(frozen=True)
class Job:
    """A candidate, or a trial of it."""

    name: str
    algorithm: Algorithm
    privacy: PrivacyConfig
    run: RunConfig
    settings: dict[str, Any]
    """The given settings, in JSON's types."""
    log: Path
    held_out: bool = True
    """False: held-out users are evaluated after the training, with noise."""

    @property
    def summary(self) -> dict[str, Any] | None:
        """Contents of `summary.json`; None if the run has not finished."""
        try:
            summary = json.loads((self.run.run_dir / directory.SUMMARY).read_text())
        except (OSError, ValueError):
            return None
        steps = summary.get("steps_done"), summary.get("num_steps")
        return summary if None not in steps and steps[0] == steps[1] else None


@dataclasses.dataclass(frozen=True)
class Selection:
    """Settings of a private selection."""

    mean: float | None = None
    """Expected number of trials. >= 1. Default: the number of candidates."""
    shape: float = 0.0
    """Shape of the distribution of the number of trials; see `SelectionEvent`."""
    eval_epsilon: float | None = None
    """Cost of all evaluations for the held-out users. > 0. Default: their texts are public."""


@dataclasses.dataclass(frozen=True)
class Priced:
    """The price of a selection, known before it is run."""

    event: SelectionEvent
    delta: float
    epsilon: float
    """epsilon of the private selection."""
    epsilon_of_all: float
    """epsilon of training every candidate once and releasing all of them."""
    epsilon_of_one: float
    """epsilon of the most expensive candidate."""
    reasons: str
    """Values of facts that make it no guarantee."""
    non_private: tuple[Stated, ...]
    """Facts that the guarantee of one candidate or another does not cover."""
    evaluations: "Evaluations | None" = None
    """Evaluations of the held-out users with noise; None: they have no noise."""

    @property
    def all_once(self) -> bool:
        """True if every candidate is trained once, because that costs less."""
        return self.epsilon_of_all <= self.epsilon

    @property
    def phases(self) -> Events:
        """Events released of the training users."""
        if self.all_once:
            return [phase for candidate in self.event.candidates for phase in candidate]
        return [(self.event, 1)]


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """All evaluations of a selection, as released of the held-out users."""

    noise_multiplier: float
    """sigma of each evaluation."""
    delta: float
    phases: Events
    slack: tuple[float, float]
    """Slack of the noise of evaluations; not included in `phases`."""


def price(jobs: Sequence[Job], data: Dataset, how: Selection) -> Priced:
    """Price of a selection among these candidates.

    Raises: ConfigError: a candidate is not allowed in a private selection.
    """
    candidates, reasons, slacks, deltas = [], set(), [], set()
    not_covered: dict[Stated, None] = {}  # each once, in order
    one_owner = graph_of(data.train) is None  # else groups differ with the key of each trial
    source, held_out = jobs[0].run.data.source, data.eval_users
    expect("data", source, one_owner, "texts with one owner each")
    num_users = held_out.num_users if held_out is not None else 0
    expect("data", source, num_users > 0, "data with held-out users")  # before anyone is counted
    for job in jobs:
        privacy, run = job.privacy, job.run
        for name in ("strict", "fit_limit"):  # of the selection, not of a trial
            given = getattr(run, name)
            expect(name, given, not given, "false in a private selection")
        runnable(privacy, run)
        expect("epsilon", privacy.epsilon, math.isfinite(privacy.epsilon), "a finite one")
        share = privacy.group_size_epsilon
        expect("group_size_epsilon", share, share is None, "none in a private selection")
        given = privacy.group_size is not None or job.algorithm == Algorithm.ULS
        expect("group_size", None, given, "a number in a private selection of els")
        for_trial = privacy.eval_epsilon
        none = "none of a trial, but of the selection"
        expect("eval_epsilon", for_trial, for_trial is None, none)
        key = SecretKey.create(run.seed)
        completed, non_private = fill_defaults(job.algorithm, privacy, data, key=key)
        non_private += facts_of_start(run, fresh_model=run.model.source in PRESETS)
        method = method_for(job.algorithm, completed, data.train, key)
        plan = make_plan(
            job.algorithm, completed, data.train, method, MAX_PARAMETERS, non_private, data_seal=""
        )
        candidates.append(tuple(planned_phases(plan, method) or ()))
        not_covered.update(dict.fromkeys((*plan.facts, *plan.given)))
        slacks.append(plan.slack)
        reasons.add(plan.reasons)
        deltas.add(plan.delta)
    expect("delta", sorted(deltas), len(deltas) == 1, "the same one for all candidates")
    delta, mean = deltas.pop(), float(how.mean or len(jobs))
    of_trial = (max(part.epsilon for part in slacks), max(part.delta for part in slacks))
    event = SelectionEvent(tuple(candidates), mean, how.shape, of_trial)
    together = [phase for candidate in candidates for phase in candidate]
    priced = Priced(
        event,
        delta,
        accounting.epsilon([(event, 1)], delta),
        accounting.epsilon_with([of_trial] * len(jobs), together, delta),
        max(accounting.epsilon(candidate, delta) for candidate in candidates),
        "; ".join(sorted(reasons - {""})),
        tuple(not_covered),
    )
    if how.eval_epsilon is None:
        return priced
    expect("eval_epsilon", how.eval_epsilon, num_users > 1, TWO_HELD_OUT)
    once = len(jobs) if priced.all_once else None
    evaluations = evaluations_of(
        how.eval_epsilon, delta_of(num_users, delta), mean, how.shape, once=once
    )
    return dataclasses.replace(priced, evaluations=evaluations)


def evaluations_of(
    epsilon: float, delta: float, mean: float, shape: float, *, once: int | None = None
) -> Evaluations:
    """Evaluations that together cost every held-out user epsilon.

    Args:
      mean, shape: of the distribution of the number of trials.
      once: number of trials where it is not secret.
    """
    if once is not None:
        sigma, part = noise_of(epsilon, delta, once)
        return Evaluations(sigma, delta, [(StepEvent(sigma, 1.0), once)], part)
    part = slack(1, epsilon, delta)

    def event(sigma: float) -> SelectionEvent:
        return SelectionEvent((((StepEvent(sigma, 1.0), 1),),), mean, shape, part)

    def spend(sigma: float, accuracy: float) -> float:
        return spent([(event(sigma), 1)], delta, accuracy)

    sigma = calibration.calibrate("noise_multiplier", spend, epsilon, 5.0, (1e5, 0.1), None)
    return Evaluations(sigma, delta, [(event(sigma), 1)], (0.0, 0.0))


def sentences(priced: Priced, candidates: int, how: Selection) -> list[str]:
    """Sentences that state the price of a selection."""
    best = f"the best of {candidates} candidates, each trained once"
    if not priced.all_once:
        best = (
            f"the best of a secret number of trials, {priced.event.mean:g} expected, of "
            f"{candidates} candidates"
        )
    spent = min(priced.epsilon, priced.epsilon_of_all)
    label = f" (no guarantee: {in_words(priced.reasons)})" if priced.reasons else ""
    delta = at_most(priced.delta, ".2e")
    costs = (priced.epsilon, priced.epsilon_of_all, priced.epsilon_of_one)
    selected, every, one = (at_most(cost, ".4g") for cost in costs)
    said = [
        f"What is released is {best}: epsilon = {at_most(spent, '.4g')} at delta = {delta}{label} "
        "for every training user.",
        f"By private selection it costs {selected}, with every candidate trained once and all of "
        f"them released {every}, and one alone {one}.",
        f"Not covered by the guarantee: {'; '.join(map(str, priced.non_private)) or 'nothing'}.",
    ]
    if priced.evaluations is None:
        said.append(
            f"The metric, {METRIC}, was computed without noise: the texts of held-out users were "
            "said to be public."
        )
    else:
        assert how.eval_epsilon is not None
        at = at_most(priced.evaluations.delta, ".2e")
        said.append(
            f"The metric, {METRIC}, has noise: it costs every held-out user epsilon = "
            f"{at_most(how.eval_epsilon, '.4g')} at delta = {at}."
        )
    return said
