"""`fedsim sweep --private`: settings are chosen by a metric, and the choice is paid for.

Each trial draws one of the candidates and trains it; how many trials there are is drawn, too, and
stays secret; only the best model is kept (`accounting.selection`). Where running every candidate
once costs less, that is done instead. Both are decided before anything is run.
"""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedsim import accounting
from fedsim.accounting import (
    Phases,
    SelectionEvent,
    StepEvent,
    at_most,
    calibration,
    draw_trials,
    spent,
)
from fedsim.budget import Applicant, Limit, admitted, close, place_of
from fedsim.config import changed_run, to_json
from fedsim.data import Dataset
from fedsim.errors import FedsimError, expect
from fedsim.evaluate import last_model
from fedsim.files import make_directory, private_directory, read_json, sync_directory, write_json
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.models import PRESETS
from fedsim.noise import noisy_mean_loss, slack
from fedsim.plan import (
    MOST_PARAMETERS,
    TWO_HELD_OUT,
    complete,
    delta_of,
    make_plan,
    method_for,
    noise_of,
    planned_phases,
)
from fedsim.run import Console, directory, find_model, load_data
from fedsim.sampling import graph_of
from fedsim.training import Diverged, expect_strategy, largest_loss, outside, user_losses
from fedsim.tuning.same_selection import BEGAN, Began
from fedsim.tuning.sweep import LOGS, RUNS, Job, Settings, entries, jobs_of, outcomes_of

METRIC = "eval/loss"
BEST, RESULT, EVALUATIONS, CHOSEN = "best", "selection.json", "evaluations", "chosen.json"


@dataclasses.dataclass(frozen=True)
class Selection:
    """How a private selection is made."""

    mean: float | None = None
    """Expected number of trials; None: as many as there are candidates."""
    shape: float = 0.0
    """Of the distribution of the number of trials; see `SelectionEvent`."""
    eval_epsilon: float | None = None
    """What all evaluations may cost the held-out users; None: their texts are public."""
    at_once: int | None = None
    in_turn: bool = False
    here: bool = False
    """How trials are run; see `sweep`."""


@dataclasses.dataclass(frozen=True)
class Priced:
    """What a selection costs, known before it is run."""

    event: SelectionEvent
    delta: float
    epsilon: float
    """Of the selection."""
    epsilon_of_all: float
    """Of every candidate, trained once and released."""
    epsilon_of_one: float
    """Of the dearest candidate."""
    label: str
    non_private: tuple[str, ...]
    """What the guarantee of any candidate does not cover."""
    evaluations: "Evaluations | None" = None
    """Of the held-out users; None: without noise."""

    @property
    def all_once(self) -> bool:
        """Whether every candidate is trained once, because that costs less."""
        return self.epsilon_of_all <= self.epsilon

    @property
    def phases(self) -> Phases:
        """What is released of the training users."""
        if self.all_once:
            return [phase for candidate in self.event.candidates for phase in candidate]
        return [(self.event, 1)]


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """What all evaluations of a selection release of the held-out users."""

    noise_multiplier: float
    """Of each of them."""
    delta: float
    phases: Phases
    slack: tuple[float, float]
    """That is not part of the phases."""


def select(
    settings: Sequence[Settings], out: Path, how: Selection, console: Console
) -> dict[str, Any]:
    """Run the trials, keep the best model in `out`/best, and say what that cost.

    A selection that was killed goes on with the same trials. Of the others nothing is kept: whoever
    saw them would have to be counted for all of them.
    Raises: ConfigError: a setting has no place in a private selection, a limit would be broken, or
      `out` has a selection that began with other settings or data.
    """
    if (out / RESULT).exists():
        for counted in (out, out / EVALUATIONS):
            close(counted)  # it may have been cut off there
        _keep_best(out)  # or there
        return read_json(out / RESULT)
    expect("out", out, not (out / BEST).exists(), "a directory without a chosen model")
    _expect_place(out)
    jobs = jobs_of(settings, out)
    data = _data(jobs, console)
    priced = price(jobs, data, how)
    for line in sentences(priced, len(jobs), how):
        console.note(line)
    private_directory("out", out)
    for name in (RUNS, LOGS):
        make_directory(out / name)
    if not any((out / name).exists() for name in (KEY, BEGAN)):
        SecretKey.create().save(out)
    key = SecretKey.load(out)
    began = Began(jobs, data, priced.event, how.eval_epsilon, key)
    began.expect_same(out)
    with _admitted(jobs[0], data, priced, out, key):
        began.save(out)  # from here on there may be trials
        trials = _trials(jobs, priced, out, key)
        scores = []
        for trial, outcome in outcomes_of(
            [each for each in trials if each.summary is None],
            console,
            at_once=how.at_once,
            in_turn=how.in_turn,
            here=how.here,
        ):
            if isinstance(outcome, FedsimError) and not isinstance(outcome, Diverged):
                raise outcome  # a worker was lost, say: the same command goes on
            console.note(f"{trial.name} ended")
        for number, trial in enumerate(trials):
            scores.append(_score(trial, number, data, priced, key, console))
        best = min(range(len(trials)), key=lambda number: scores[number])
        expect("settings", "", math.isfinite(scores[best]), "a trial that ends with a loss")
        result = {
            "out": str(out),
            "best": str(out / BEST),
            "settings": trials[best].settings,
            METRIC: scores[best],
            "epsilon": to_json(priced.epsilon_of_all if priced.all_once else priced.epsilon),
            "delta": priced.delta,
            "all_once": priced.all_once,
            "epsilon_of_selection": to_json(priced.epsilon),
            "epsilon_of_all": to_json(priced.epsilon_of_all),
            "epsilon_of_one": to_json(priced.epsilon_of_one),
            "candidates": len(jobs),
            "expected_trials": priced.event.mean,
            "shape": priced.event.shape,
            "eval_epsilon": how.eval_epsilon,
            "eval_delta": priced.evaluations and priced.evaluations.delta,
            "guarantee": not priced.label,
            "non_private": list(priced.non_private),
            "claim": "\n".join(sentences(priced, len(jobs), how)),
        }
        # The choice is made once: from here on the same command only puts things into their
        # places. Made before the ledger says that it is released: from then on it is not made anew.
        write_json(out / CHOSEN, {"name": trials[best].name}, mode=0o600)
        write_json(out / RESULT, result, mode=0o600)
    _keep_best(out)
    return result


def _expect_place(out: Path) -> None:
    """Raises ConfigError: there is something else than a selection, which removes its trials."""
    there = entries(out)
    inside = [path for name in (RUNS, LOGS) if name in there for path in (out / name).iterdir()]
    begun = {KEY, RUNS} <= there or there & {BEGAN, CHOSEN, RESULT}
    own = bool(begun) or (there <= {LOGS, RUNS} and not inside)
    expect("out", out, own, "a new or empty directory, or that of a selection")


def _keep_best(out: Path) -> None:
    """Put the chosen model into its place and remove all others, as far as that is not done."""
    if not (out / CHOSEN).exists():
        return
    chosen = out / RUNS / read_json(out / CHOSEN)["name"]
    if chosen.exists():
        chosen.rename(out / BEST)
        sync_directory(out)  # before what says that it is to be done is gone
    for name in (RUNS, LOGS):
        if (out / name).exists():
            shutil.rmtree(out / name)
    (out / BEGAN).unlink(missing_ok=True)  # the result says it
    (out / CHOSEN).unlink()


def price(jobs: Sequence[Job], data: Dataset, how: Selection) -> Priced:
    """What a selection among these candidates costs.

    Raises: ConfigError: one has no place in it.
    """
    candidates, labels, slacks, deltas = [], set(), [], set()
    not_covered: dict[str, None] = {}  # each once, in order
    one_owner = graph_of(data.train) is None  # else groups differ with the key of each trial
    source, held_out = jobs[0].run.data.source, data.eval_users
    expect("data", source, one_owner, "texts with one owner each")
    num_users = held_out.num_users if held_out is not None else 0
    expect("data", source, num_users > 0, "data with held-out users")  # before anyone is counted
    for job in jobs:
        privacy, run = job.privacy, job.run
        expect_strategy(run.engine)
        expect("epsilon", privacy.epsilon, math.isfinite(privacy.epsilon), "a finite one")
        share = privacy.group_size_epsilon
        expect("group_size_epsilon", share, share is None, "none in a private selection")
        of_trial = privacy.eval_epsilon
        expect("eval_epsilon", of_trial, of_trial is None, "none of a trial, but of the selection")
        key = SecretKey.create(run.seed)
        completed, non_private = complete(job.algorithm, privacy, data, key=key)
        non_private += outside(run, fresh_model=run.model.source in PRESETS)
        method = method_for(job.algorithm, completed, data.train, key)
        facts = (MOST_PARAMETERS, non_private, "")
        plan = make_plan(job.algorithm, completed, data.train, method, *facts)
        candidates.append(tuple(planned_phases(plan, method) or ()))
        not_covered.update(dict.fromkeys(plan.non_private))
        slacks.append(plan.slack)
        labels.add(plan.label)
        deltas.add(plan.delta)
    expect("delta", sorted(deltas), len(deltas) == 1, "the same one for all candidates")
    delta, mean = deltas.pop(), float(how.mean or len(jobs))
    of_each = (max(each.epsilon for each in slacks), max(each.delta for each in slacks))
    event = SelectionEvent(tuple(candidates), mean, how.shape, of_each)
    together = [phase for candidate in candidates for phase in candidate]
    priced = Priced(
        event,
        delta,
        accounting.epsilon([(event, 1)], delta),
        accounting.epsilon_with([of_each] * len(jobs), together, delta),
        max(accounting.epsilon(candidate, delta) for candidate in candidates),
        "; ".join(sorted(labels - {""})),
        tuple(not_covered),
    )
    if how.eval_epsilon is None:
        return priced
    expect("eval_epsilon", how.eval_epsilon, num_users > 1, TWO_HELD_OUT)
    once = len(jobs) if priced.all_once else None
    facts = (how.eval_epsilon, delta_of(num_users, delta), mean, how.shape)
    return dataclasses.replace(priced, evaluations=evaluations_of(*facts, once=once))


def evaluations_of(
    epsilon: float, delta: float, mean: float, shape: float, *, once: int | None = None
) -> Evaluations:
    """The evaluations that cost every held-out user epsilon, all together.

    Args: mean, shape: of the number of trials; once: that number, where it is no secret.
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
    """What a selection costs, in words."""
    best = f"the best of {candidates} candidates, each trained once"
    if not priced.all_once:
        best = (
            f"the best of a secret number of trials, {priced.event.mean:g} expected, of "
            f"{candidates} candidates"
        )
    spent = min(priced.epsilon, priced.epsilon_of_all)
    label = f" ({priced.label})" if priced.label else ""
    delta = at_most(priced.delta, ".2e")
    costs = (priced.epsilon, priced.epsilon_of_all, priced.epsilon_of_one)
    selected, every, one = (at_most(each, ".4g") for each in costs)
    said = [
        f"What is released is {best}: epsilon = {at_most(spent, '.4g')} at delta = {delta}{label} "
        "for every training user.",
        f"By private selection it costs {selected}, with every candidate trained once and all of "
        f"them released {every}, and one alone {one}.",
        f"Not covered by the guarantee: {'; '.join(priced.non_private)}.",
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


def _data(jobs: Sequence[Job], console: Console) -> Dataset:
    """The data that all candidates are trained on."""
    places = {(job.run.data.source, str(job.run.data.options)) for job in jobs}
    expect("data", sorted(places), len(places) == 1, "the same for all candidates")
    run = jobs[0].run
    return load_data(run.data, find_model(run.model.source), console.note)


def _admitted(job: Job, data: Dataset, priced: Priced, out: Path, key: SecretKey) -> ExitStack:
    """Count the selection in the ledger of the data, and its evaluations for held-out users.

    Raises: ConfigError: a limit of one of these users would be broken.
    """
    place, limit = place_of(job.run.budget_ledger), job.run.limit_epsilon
    each = len(priced.event.candidates) if priced.all_once else 0  # else part of the event
    part = (each * priced.event.slack[0], each * priced.event.slack[1])
    own = [("selection", data.train, priced.delta, priced.phases, part, priced.label, out)]
    if (found := priced.evaluations) is not None and data.eval_users is not None:
        make_directory(out / EVALUATIONS)
        facts = (found.delta, found.phases, found.slack, "", out / EVALUATIONS)
        own.append(("evaluation", data.eval_users, *facts))
    applicants = []
    for kind, users, delta, phases, part, label, directory_of in own:
        bound = None if limit is None else Limit(limit, delta)
        applicant = Applicant(place, users.user_ids(), kind, bound, directory_of)
        entry = applicant.entry(key.seal(kind), list(phases), part, label)
        applicant.expect_room(entry)  # of all of them, before any is counted
        applicants.append((applicant, entry))
    with ExitStack() as stack:
        for applicant, entry in applicants:
            stack.enter_context(admitted(applicant, entry))
        return stack.pop_all()


def _trials(jobs: Sequence[Job], priced: Priced, out: Path, key: SecretKey) -> list[Job]:
    """The trials, in order: the same whenever they are drawn.

    Their names say nothing of that order: settings of the chosen one are public, its number is not.
    """
    rng = key.generator("trials")
    drawn = list(range(len(jobs)))
    if not priced.all_once:
        drawn = rng.integers(0, len(jobs), draw_trials(priced.event, rng)).tolist()
    found, public = [], priced.evaluations is None
    for number, choice in enumerate(drawn):
        name, job = key.seal(f"trial {number}")[:16], jobs[choice]
        run = changed_run(job.run, run_dir=(out / RUNS / name).absolute(), limit_epsilon=None)
        log = (out / LOGS / f"{name}.txt").absolute()
        found.append(
            dataclasses.replace(job, name=name, run=run, log=log, trial=True, held_out=public)
        )
    return found


def _score(
    trial: Job, number: int, data: Dataset, priced: Priced, key: SecretKey, console: Console
) -> float:
    """A trial's loss on held-out users, with noise if they are protected; inf if it diverged."""
    summary = trial.summary
    if summary is None:
        return math.inf
    if priced.evaluations is None or data.eval_users is None:
        return float(summary["final_eval_loss"])
    stored = directory.load(trial.run.run_dir)
    task, params, _, _ = last_model(stored, trial.run, console)
    rng = key.generator("evaluation", number)
    losses = user_losses(task, params, "eval_users")
    return noisy_mean_loss(
        losses,
        bound=largest_loss(data.train.vocab_size),
        count=data.eval_users.num_users,
        stddev=priced.evaluations.noise_multiplier,
        rng=rng,
    )
