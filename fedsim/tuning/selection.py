"""Private selection: `fedsim select` chooses settings by a metric, at a price.

Each trial draws one of the candidates and trains it. The number of trials is drawn, too, and stays
secret; only the best model is kept (`accounting.selection`). The price is known before anything is
run. Trials run one after another, each as `fedsim train` would run it.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim import accounting
from fedsim.accounting import SelectionEvent, at_most, draw_trials
from fedsim.budget import BudgetRequest, Limit, admitted, close, place_of
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    changed_run,
    configs_of,
    settings_of,
    to_json,
)
from fedsim.data import Dataset
from fedsim.errors import ConfigError, FedsimError, expect
from fedsim.files import make_directory, private_directory, read_json, sync_directory, write_json
from fedsim.keys import SecretKey
from fedsim.models import PRESETS
from fedsim.plan import (
    MAX_PARAMETERS,
    Caveat,
    Plan,
    fill_defaults,
    in_words,
    make_plan,
    method_for,
    planned_phases,
)
from fedsim.run import Console, directory, find_model, load_data, model_sha256, verbosity
from fedsim.sampling import graph_of
from fedsim.training import (
    Diverged,
    Purpose,
    expect_runnable,
    facts_of_start,
    open_run,
    prepare_run,
    train,
)

METRIC = "eval/loss"
RUNS = "runs"
BEST, RESULT = "best", "selection.json"
BEGAN = "began.json"
"""File with a keyed digest, which only the owner of the key can compare: seeds and data are among
the settings."""
OF_SELECTION = {"run_dir", "resume"}
"""Settings of a run that a selection sets itself."""
PLACES = ("data", "model", "tokenizer")

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """A candidate, or a trial of it."""

    name: str
    algorithm: Algorithm
    privacy: PrivacyConfig
    run: RunConfig
    settings: dict[str, Any]
    """The given settings, in JSON's types."""
    purpose: Purpose = Purpose.TRAIN

    @property
    def summary(self) -> dict[str, Any] | None:
        """Contents of `summary.json`; None if the run has not finished."""
        summary = directory.summary_of(self.run.run_dir)
        ended = summary is not None and summary["steps_done"] == summary["num_steps"]
        return summary if ended else None


def expand(spec: Settings) -> list[dict[str, Any]]:
    """Settings of each candidate that a file describes.

    Args:
      spec: settings of all candidates; `grid` with lists of values, of which every combination is
        one; `runs` with a list of settings that belong together, each combined with the grid.
    Raises: ConfigError: grid or runs have another form.
    """
    fixed = {name: value for name, value in spec.items() if name not in ("grid", "runs")}
    grid, runs = spec.get("grid", {}), spec.get("runs", [{}])
    expect("grid", grid, isinstance(grid, Mapping), "settings with lists of values")
    right = isinstance(runs, Sequence) and all(isinstance(run, Mapping) for run in runs)
    expect("runs", runs, right and len(runs) > 0, "a list of settings, not an empty one")
    for name, values in grid.items():
        expect(name, values, isinstance(values, list) and bool(values), "a list of values in grid")
    return [
        {**fixed, **run, **dict(zip(grid, values, strict=True))}
        for run in runs
        for values in itertools.product(*grid.values())
    ]


def jobs_of(settings: Sequence[Settings], out: Path) -> list[Job]:
    """A job for each of the settings, in order.

    Raises: ConfigError: a setting is unknown, missing or out of range, or one of OF_SELECTION.
    """
    return [_job(given, out, f"candidate-{number}") for number, given in enumerate(settings, 1)]


def _job(settings: Settings, out: Path, name: str) -> Job:
    given = {name: value for name, value in settings.items() if value is not None}
    for name in OF_SELECTION & given.keys():
        raise ConfigError.of(name, given[name], "nothing, it is the selection's own")
    algorithm = given.pop("algorithm", None)
    expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
    missing = [name for name in ("data", "epsilon", "num_steps") if name not in given]
    expect(", ".join(missing), None, not missing, "a value in the file")
    privacy, run = configs_of({**given, "run_dir": out})
    places = {field: settings_of(run)[field] for field in PLACES}
    run = changed_run(
        run,
        **{field: _whole(place) for field, place in places.items() if place is not None},
        run_dir=out.absolute() / RUNS / name,
        resume=True,
        budget_ledger=place_of(run.budget_ledger),
    )
    shown = {"algorithm": str(algorithm), **{n: to_json(settings[n]) for n in settings}}
    return Job(name, Algorithm(algorithm), privacy, run, shown)


def _whole(source: str) -> str:
    """The source, with the whole path of a file or directory."""
    is_path = source not in PRESETS and Path(source).exists()
    return str(Path(source).absolute()) if is_path else source


def outcomes_of(jobs: Sequence[Job]) -> Iterator[tuple[Job, FedsimError | None]]:
    """Train the jobs, or resume them, one after another, without their messages.

    Yields: (job, the error that ended it or None).
    Raises: KeyboardInterrupt: a signal ended a run early; the current step is saved.
    """
    for job in jobs:
        ended = None
        with verbosity("quiet"), contextlib.redirect_stderr(io.StringIO()):
            try:
                train(job.algorithm, job.privacy, job.run, Console(), purpose=job.purpose)
            except FedsimError as error:
                ended = error
        if ended is None and job.summary is None:
            raise KeyboardInterrupt
        yield job, ended


@dataclasses.dataclass(frozen=True)
class Priced:
    """The price of a selection, known before it is run."""

    event: SelectionEvent
    delta: float
    epsilon: float
    epsilon_of_one: float
    """epsilon of the most expensive candidate."""
    reasons: str
    """Values of facts that make it no guarantee."""
    non_private: tuple[Caveat, ...]
    """Facts that the guarantee of one candidate or another does not cover."""


def price(jobs: Sequence[Job], data: Dataset, mean: float | None) -> Priced:
    """Price of a selection among these candidates, before any of them runs.

    Args: mean: as for `select`.
    Raises: ConfigError: a candidate is not allowed in a private selection.
    """
    one_owner = graph_of(data.train) is None  # else groups differ with the key of each trial
    source = jobs[0].run.data.source
    expect("data", source, one_owner, "texts with one owner each")
    num_users = data.eval_users.num_users if data.eval_users is not None else 0
    expect("data", source, num_users > 0, "data with held-out users")  # before anyone is counted
    plans, candidates = zip(*(_planned(job, data) for job in jobs), strict=True)
    deltas = {plan.delta for plan in plans}
    expect("delta", sorted(deltas), len(deltas) == 1, "the same one for all candidates")
    delta = deltas.pop()
    of_trial = (max(p.slack.epsilon for p in plans), max(p.slack.delta for p in plans))
    event = SelectionEvent(candidates, float(mean or len(jobs)), slack=of_trial)
    return Priced(
        event,
        delta,
        accounting.epsilon([(event, 1)], delta),
        max(accounting.epsilon(candidate, delta) for candidate in candidates),
        "; ".join(sorted({plan.reasons for plan in plans} - {""})),
        tuple(dict.fromkeys(fact for plan in plans for fact in (*plan.caveats, *plan.assumptions))),
    )


def _planned(job: Job, data: Dataset) -> tuple[Plan, tuple[Any, ...]]:
    """A candidate's plan and events. Raises: ConfigError: it is not allowed in a selection."""
    privacy, run = job.privacy, job.run
    expect("strict", run.strict, not run.strict, "false in a private selection")
    expect_runnable(privacy, run)
    expect("epsilon", privacy.epsilon, math.isfinite(privacy.epsilon), "a finite one")
    for name in ("group_size_epsilon", "eval_epsilon"):
        value = getattr(privacy, name)
        expect(name, value, value is None, "none of a trial in a private selection")
    has_size = privacy.group_size is not None or job.algorithm == Algorithm.ULS
    expect("group_size", None, has_size, "a number in a private selection of els")
    key = SecretKey.create(run.seed)
    privacy, non_private = fill_defaults(job.algorithm, privacy, data)
    non_private += facts_of_start(run, fresh_model=run.model.source in PRESETS)
    method = method_for(job.algorithm, privacy, data.train, key)
    plan = make_plan(
        job.algorithm, privacy, data.train, method, MAX_PARAMETERS, non_private, data_seal=""
    )
    return plan, tuple(planned_phases(plan, method) or ())


def sentences(priced: Priced) -> list[str]:
    """Sentences that state the price of a selection."""
    count = len(priced.event.candidates)
    label = f" (no guarantee: {in_words(priced.reasons)})" if priced.reasons else ""
    return [
        f"What is released is the best of a secret number of trials, {priced.event.mean:g} "
        f"expected, of {count} candidates: epsilon = {at_most(priced.epsilon, '.4g')} at delta = "
        f"{at_most(priced.delta, '.2e')}{label} for every training user; one candidate alone would "
        f"cost {at_most(priced.epsilon_of_one, '.4g')}.",
        f"Not covered by the guarantee: {'; '.join(map(str, priced.non_private)) or 'nothing'}.",
        f"The metric, {METRIC}, was computed without noise: the texts of held-out users were said "
        "to be public.",
    ]


def select(
    settings: Sequence[Settings],
    out: Path,
    console: Console,
    *,
    mean: float | None = None,
) -> dict[str, Any]:
    """Run the trials, keep the best model in `out`/best, and return the cost of the choice.

    The same command continues a selection that was killed, with the same trials; those that have
    finished are not trained again. All trials but the best are deleted: whoever saw them would have
    to be counted for all of them.
    Args:
      settings: settings of each candidate by flag name, and `algorithm`.
      out: directory of the selection.
      mean: expected number of trials, >= 1; None: the number of candidates.
    Returns: contents of `selection.json`.
    Raises: ConfigError: a setting is not allowed in a private selection, a limit would be broken,
      or `out` has anything but a selection with these settings and data.
    """
    began, ended = (out / BEGAN).exists(), (out / RESULT).exists()
    new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    expect("out", out, began or new, "an empty directory, or that of a selection")
    expect("out", out, ended or not (out / BEST).exists(), "a directory without a chosen model")
    jobs = jobs_of(settings, out)
    data = _data(jobs, console)
    priced = price(jobs, data, mean)
    if not began:  # a trial that cannot be run would be paid for in vain
        for line in sentences(priced):
            console.note(line)
        with console.phase("planning the candidates"), verbosity("quiet"):
            for job in jobs:
                trial = (job.algorithm, job.privacy, job.run, Console())
                with open_run(*trial, purpose=Purpose.TRIAL) as opened:
                    prepare_run(opened, dry_run=True)
        private_directory("out", out)
        key = SecretKey.create()
        key.save(out)
        write_json(out / BEGAN, {"seal": _seal(jobs, data, priced, key)}, mode=0o600)
    key = SecretKey.load(out)
    # Trials are reused: with others they would be released at a price that is not theirs.
    same = read_json(out / BEGAN).get("seal") == _seal(jobs, data, priced, key)
    began_with = "the candidates, data and price that it began with; another out is for others"
    expect("out", out, same, began_with)
    if ended:  # the command may have been interrupted at the end
        close(out)
        result = read_json(out / RESULT)
    else:
        result = _run(jobs, data, priced, out, key, console)
    _keep_best(out, result["trial"])
    return result


def _run(
    jobs: Sequence[Job], data: Dataset, priced: Priced, out: Path, key: SecretKey, console: Console
) -> dict[str, Any]:
    """Run the trials, and write selection.json."""
    run, delta = jobs[0].run, priced.delta
    limit = None if run.limit_epsilon is None else Limit(run.limit_epsilon, delta)
    place, ids = place_of(run.budget_ledger), data.train.user_ids()
    request = BudgetRequest(place, ids, "selection", limit, out)
    entry = request.entry(key.seal("selection"), [(priced.event, 1)], (0.0, 0.0), priced.reasons)
    with admitted(request, entry):
        make_directory(out / RUNS)
        trials = _trials(jobs, priced, out, key)
        for trial, error in outcomes_of([each for each in trials if each.summary is None]):
            if error is not None and not isinstance(error, Diverged):
                raise error  # the same command continues
            console.note(f"{trial.name} ended")
        scores = list(map(_score, trials))
        best = min(range(len(trials)), key=lambda number: scores[number])
        expect("settings", "", math.isfinite(scores[best]), "a trial that ends with a loss")
        result = _result(out, trials[best], scores[best], priced)
        # Written before the ledger says that the choice is released, which is never made anew.
        write_json(out / RESULT, result, mode=0o600)
    return result


def _result(out: Path, best: Job, score: float, priced: Priced) -> dict[str, Any]:
    """Contents of `selection.json`: the chosen settings, and the cost of the choice."""
    return {
        "out": str(out),
        "best": str(out / BEST),
        "trial": best.name,
        "settings": best.settings,
        METRIC: score,
        "epsilon": to_json(priced.epsilon),
        "delta": priced.delta,
        "epsilon_of_one": to_json(priced.epsilon_of_one),
        "candidates": len(priced.event.candidates),
        "expected_trials": priced.event.mean,
        "guarantee": not priced.reasons,
        "non_private": [fact.as_dict() for fact in priced.non_private],
        "claim": "\n".join(sentences(priced)),
    }


def _keep_best(out: Path, chosen: str) -> None:
    """Move the chosen trial to `best/` and delete the others; may be repeated."""
    if (out / RUNS / chosen).exists():
        (out / RUNS / chosen).rename(out / BEST)
        sync_directory(out)
    if (out / RUNS).exists():
        shutil.rmtree(out / RUNS)


def _data(jobs: Sequence[Job], console: Console) -> Dataset:
    """The data of all candidates. Raises: ConfigError: they differ."""
    runs = [job.run for job in jobs]
    values = {
        "data": {(run.data.source, str(run.data.options)) for run in runs},
        # The selection is counted once, with these.
        **{n: {str(getattr(run, n)) for run in runs} for n in ("budget_ledger", "limit_epsilon")},
    }
    for field, different in values.items():
        expect(field, sorted(different), len(different) == 1, "the same for all candidates")
    return load_data(runs[0].data, find_model(runs[0].model.source), console.note)


def _trials(jobs: Sequence[Job], priced: Priced, out: Path, key: SecretKey) -> list[Job]:
    """The trials in order, the same whenever they are drawn."""
    rng, trials = key.generator("trials"), []
    for number, choice in enumerate(rng.integers(0, len(jobs), draw_trials(priced.event, rng))):
        # Names do not reveal the order: the chosen settings are public, their number is not.
        name, job = key.seal(f"trial {number}")[:16], jobs[choice]
        run = changed_run(job.run, run_dir=(out / RUNS / name).absolute(), limit_epsilon=None)
        trials.append(dataclasses.replace(job, name=name, run=run, purpose=Purpose.TRIAL))
    return trials


def _score(trial: Job) -> float:
    """A trial's loss on held-out users; inf without a number."""
    loss = math.nan if trial.summary is None else float(trial.summary["final_eval_loss"])
    return math.inf if math.isnan(loss) else loss  # nan would compare as no larger than any


def _seal(jobs: Sequence[Job], data: Dataset, priced: Priced, key: SecretKey) -> str:
    """A keyed digest of candidates, data and price."""
    sources = {job.run.model.source for job in jobs}
    models = {source: model_sha256(find_model(source)) for source in sources}
    candidates = []
    for job in jobs:
        named = {n: value for n, value in job.settings.items() if n not in OPERATIONAL}
        candidates.append((named, models[job.run.model.source]))
    users = [store.fingerprint for store in (data.train, data.eval_users) if store is not None]
    mean, shape = priced.event.mean, priced.event.shape
    return key.seal(f"selection {candidates!r} {users!r} {mean!r} {shape!r}")
