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

from fedsim.accounting import SelectionEvent, draw_trials
from fedsim.budget import Applicant, Limit, admitted, close, place_of
from fedsim.config import (
    OPERATIONAL,
    PrivacyConfig,
    RunConfig,
    as_dict,
    changed,
    changed_run,
    to_json,
)
from fedsim.data import Dataset
from fedsim.errors import FedsimError, expect
from fedsim.evaluate import last_model
from fedsim.files import make_directory, private_directory, read_json, sync_directory, write_json
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.run import Console, directory, find_model, load_data, model_sha256
from fedsim.training import Diverged, largest_loss, user_losses
from fedsim.tuning.pricing import METRIC, Priced, Selection, price, sentences
from fedsim.tuning.sweep import LOGS, RUNS, Job, Settings, entries, jobs_of, outcomes_of

BEST, RESULT, EVALUATIONS, CHOSEN = "best", "selection.json", "evaluations", "chosen.json"
BEGAN = "began.json"
"""A keyed digest of each setting, for the key's owner alone: seeds and data are among them."""


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


class Began:
    """What a selection that is to be made, or goes on, is about."""

    def __init__(
        self,
        jobs: Sequence[Job],
        data: Dataset,
        event: SelectionEvent,
        eval_epsilon: float | None,
        key: SecretKey,
    ):
        """Args: eval_epsilon: what evaluations cost; None: held-out users are public."""
        settings = _settings(jobs)
        source, models = jobs[0].run.data.source, settings.pop("model")
        stores = [store for store in (data.train, data.eval_users) if store is not None]
        known = {
            "candidates": (len(jobs), len(jobs)),
            "data": (source, [store.fingerprint for store in stores]),
            "model": (models, [models, _models_sha256(models)]),
            **{name: (values, values) for name, values in settings.items()},
            "trials": (event.mean, event.mean),
            "shape": (event.shape, event.shape),
            "eval_epsilon": (eval_epsilon, eval_epsilon),
        }
        self._shown = {name: shown for name, (shown, _) in known.items()}
        self._seals = {name: key.seal(f"{name} {meant!r}") for name, (_, meant) in known.items()}

    def expect_same(self, out: Path) -> None:
        """Raises ConfigError: the selection in `out` began as another one, or does not say how."""
        if not (out / BEGAN).exists():
            why = f"one without the trials in {out / RUNS}, which do not say what they began with"
            expect("out", out, not any((out / RUNS).iterdir()), why)
            return
        was = read_json(out / BEGAN)
        again = f"what the selection in {out} began with; another --out is for another selection"
        for name in {**self._seals, **was}:
            expect(name, self._shown.get(name), was.get(name) == self._seals.get(name), again)

    def save(self, out: Path) -> None:
        """Write it down for the next time, beside the key."""
        write_json(out / BEGAN, self._seals, mode=0o600)


def _settings(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """Of each setting that can change a trial its value in every candidate; None: its default.

    Settings at their defaults in all are left out: one that is new changes no earlier selection.
    """
    found = []
    for job in jobs:
        own = changed(PrivacyConfig, as_dict(job.privacy)) | changed(RunConfig, as_dict(job.run))
        own |= {"algorithm": str(job.algorithm), "model": job.run.model.source}
        found.append({name: value for name, value in own.items() if name not in OPERATIONAL})
    names = dict.fromkeys(name for own in found for name in own)
    return {name: [own.get(name) for own in found] for name in names}


def _models_sha256(sources: Sequence[str]) -> list[str | None]:
    """The digest of each model, of which each is read once."""
    found = {source: model_sha256(find_model(source)) for source in dict.fromkeys(sources)}
    return [found[source] for source in sources]
