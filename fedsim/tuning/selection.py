"""Private selection: `fedsim select` chooses settings by a metric, at a price.

Each trial draws one of the candidates and trains it. The number of trials is drawn, too, and stays
secret; only the best model is kept (`accounting.selection`). Where running every candidate once
costs less, that is done instead. Both are decided before anything is run. Trials run one after
another, each as `fedsim train` would run it.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedsim.accounting import SelectionEvent, draw_trials
from fedsim.budget import BudgetRequest, Limit, admitted, close, place_of
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    as_dict,
    changed,
    changed_run,
    configs_of,
    flags_of,
    original_names,
    settings_of,
    to_json,
)
from fedsim.data import Dataset
from fedsim.errors import ConfigError, FedsimError, expect
from fedsim.evaluate import last_model
from fedsim.files import (
    make_directory,
    private_directory,
    read_json,
    sync_directory,
    write_json,
)
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.models import PRESETS, peft_files
from fedsim.noise import noisy_mean_loss
from fedsim.run import Console, directory, find_model, load_data, model_sha256, verbosity
from fedsim.training import Diverged, Purpose, largest_loss, rehearse, train, user_losses
from fedsim.tuning.pricing import METRIC, Job, Priced, Selection, price, sentences

RUNS, LOGS = "runs", "logs"
BEST, RESULT, EVALUATIONS, CHOSEN = "best", "selection.json", "evaluations", "chosen.json"
BEGAN = "began.json"
"""File with a keyed digest of each setting, which only the owner of the key can compare: seeds and
data are among the settings."""
OF_SELECTION = {"run_dir", "resume"}
"""Settings of a run that a selection sets itself."""
PLACES = ("model", "adapter", "tokenizer")

Settings = Mapping[str, Any]
_FLAGS = flags_of(PrivacyConfig) | flags_of(RunConfig)
_DEFAULTS = {name: field.default for name, (_, field) in _FLAGS.items()}


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
    """A job for each of the settings, in order; equal settings give one job.

    Raises: ConfigError: a setting is unknown, missing or out of range, or one of OF_SELECTION; or
      runs differ only in settings that are no part of their names, such as limits.
    """
    jobs: dict[str, Job] = {}
    for job in (_job(given, out) for given in settings):
        first = as_dict(jobs.setdefault(job.name, job).run)
        for field, value in as_dict(job.run).items():
            one = "one value for runs that differ in nothing else"
            expect(field, value, value == first[field], one)
    return list(jobs.values())


def _job(settings: Settings, out: Path) -> Job:
    given = {name: value for name, value in settings.items() if value is not None}
    for name in OF_SELECTION & given.keys():
        raise ConfigError.of(name, given[name], "nothing, it is the selection's own")
    algorithm = given.pop("algorithm", None)
    expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
    missing = [name for name in ("data", "epsilon", "num_steps") if name not in given]
    where = "a value in the file or as --set NAME=VALUE"
    expect(", ".join(missing), None, not missing, where)
    privacy, run = configs_of({**given, "run_dir": out})
    run = changed_run(run, data=_whole(run.data.source))
    read = settings_of(privacy) | settings_of(run)
    name = _name(algorithm, {name: read[name] for name in given})
    places = {field: _whole(read[field]) for field in PLACES if read[field] is not None}
    here = {"run_dir": out.absolute() / RUNS / name, "resume": True}
    here["budget_ledger"] = place_of(run.budget_ledger)
    run = changed_run(run, **places, **here)
    shown = {"algorithm": str(algorithm), **{n: to_json(settings[n]) for n in settings}}
    log = out.absolute() / LOGS / f"{name}.txt"
    return Job(name, Algorithm(algorithm), privacy, run, shown, log)


def _whole(source: str) -> str:
    """What a setting names, with the whole path of a file or directory."""
    is_path = source not in PRESETS and Path(source).exists()
    return str(Path(source).absolute()) if is_path else source


def _name(algorithm: str, given: Settings) -> str:
    """Name of a run: a hash of its settings without those at their defaults."""
    kept = {n: to_json(v) for n, v in given.items() if v != _DEFAULTS[n]}
    kept = {n: v for n, v in kept.items() if n not in OPERATIONAL or n == "data"}
    text = json.dumps([str(algorithm), original_names(kept)], sort_keys=True)
    return f"{algorithm}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def outcomes_of(jobs: Sequence[Job]) -> Iterator[tuple[Job, FedsimError | None]]:
    """Train the jobs, or resume them, one after another; messages go to the log of each.

    Yields: (job, the error that ended it or None).
    Raises: KeyboardInterrupt: a signal ended a run early; the current step is saved.
    """
    for job in jobs:
        with (
            open(job.log, "a") as log,
            contextlib.redirect_stderr(log),
            verbosity(job.run.output),
        ):
            console = Console(log_every=job.run.log_every)
            try:
                train(
                    job.algorithm,
                    job.privacy,
                    job.run,
                    console,
                    purpose=Purpose.TRIAL,
                    held_out=job.held_out,
                )
            except FedsimError as error:
                console.note(f"fedsim: error: {error}")
                ended = error
            else:
                ended = None
        if ended is None and job.summary is None:
            raise KeyboardInterrupt
        yield job, ended


def select(
    settings: Sequence[Settings], out: Path, how: Selection, console: Console
) -> dict[str, Any]:
    """Run the trials, keep the best model in `out`/best, and return the cost of the choice.

    A selection that was killed resumes with the same trials. All other trials are deleted: whoever
    saw them would have to be counted for all of them.
    Args:
      settings: settings of each candidate by flag name, and `algorithm`.
      out: directory of the selection.
    Returns: contents of `selection.json`.
    Raises: ConfigError: a setting is not allowed in a private selection, a limit would be broken,
      or `out` has a selection with other settings or data.
    """
    ended = (out / RESULT).exists()
    expect("out", out, ended or not (out / BEST).exists(), "a directory without a chosen model")
    _expect_place(out)
    jobs = jobs_of(settings, out)
    data = _data(jobs, console)
    priced = price(jobs, data, how)
    if ended:
        if (out / BEGAN).exists():  # not one of an earlier version
            key = SecretKey.load(out)
            Began(jobs, data, priced.event, how.eval_epsilon, key).expect_same(out)
        for counted in (out, out / EVALUATIONS):
            close(counted)  # the command may have been interrupted there,
        _keep_best(out)  # or there
        return read_json(out / RESULT)
    for line in sentences(priced, len(jobs), how):
        console.note(line)
    if not (out / BEGAN).exists():  # a trial that cannot be run would be paid for in vain
        with console.phase("planning the candidates"):
            for job in jobs:
                rehearse(job.algorithm, job.privacy, job.run)
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
        _run(trials, console)
        scores = [
            _score(trial, number, data, priced, key, console) for number, trial in enumerate(trials)
        ]
        best = min(range(len(trials)), key=lambda number: scores[number])
        expect("settings", "", math.isfinite(scores[best]), "a trial that ends with a loss")
        result = _result(out, trials[best], scores[best], priced, len(jobs), how)
        # The choice is made once: from here on the same command only moves files into place. It is
        # written before the ledger says that it is released, and never made anew after that.
        write_json(out / CHOSEN, {"name": trials[best].name}, mode=0o600)
        write_json(out / RESULT, result, mode=0o600)
    _keep_best(out)
    return result


def _run(trials: Sequence[Job], console: Console) -> None:
    """Train the trials that have not finished; an error leaves them to the same command."""
    pending = [trial for trial in trials if trial.summary is None]
    for trial, error in outcomes_of(pending):
        if error is not None and not isinstance(error, Diverged):
            raise error
        console.note(f"{trial.name} ended")


def _result(
    out: Path, best: Job, score: float, priced: Priced, candidates: int, how: Selection
) -> dict[str, Any]:
    """Contents of `selection.json`: the chosen settings, and the cost of the choice."""
    return {
        "out": str(out),
        "best": str(out / BEST),
        "settings": best.settings,
        METRIC: score,
        "epsilon": to_json(priced.epsilon_of_all if priced.all_once else priced.epsilon),
        "delta": priced.delta,
        "all_once": priced.all_once,
        "epsilon_of_selection": to_json(priced.epsilon),
        "epsilon_of_all": to_json(priced.epsilon_of_all),
        "epsilon_of_one": to_json(priced.epsilon_of_one),
        "candidates": candidates,
        "expected_trials": priced.event.mean,
        "shape": priced.event.shape,
        "eval_epsilon": how.eval_epsilon,
        "eval_delta": priced.evaluations and priced.evaluations.delta,
        "guarantee": not priced.reasons,
        "non_private": [fact.as_dict() for fact in priced.non_private],
        "claim": "\n".join(sentences(priced, candidates, how)),
    }


def _expect_place(out: Path) -> None:
    """Raise ConfigError if `out` holds anything but a selection, since other trials are deleted."""
    expect("out", out, out.is_dir() or not out.exists(), "a directory")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    there = {name for name in names if not name.startswith(".") and not name.endswith(".toml")}
    inside = [path for name in (RUNS, LOGS) if name in there for path in (out / name).iterdir()]
    started = {KEY, RUNS} <= there or there & {BEGAN, CHOSEN, RESULT}
    of_selection = bool(started) or (there <= {LOGS, RUNS} and not inside)
    expect("out", out, of_selection, "a new or empty directory, or that of a selection")


def _keep_best(out: Path) -> None:
    """Move the chosen model to `best/` and delete the other trials; may be repeated."""
    if not (out / CHOSEN).exists():
        return
    chosen = out / RUNS / read_json(out / CHOSEN)["name"]
    if chosen.exists():
        chosen.rename(out / BEST)
        sync_directory(out)  # before what says that it is to be done is gone
    for name in (RUNS, LOGS):
        if (out / name).exists():
            shutil.rmtree(out / name)
    (out / CHOSEN).unlink()


def _data(jobs: Sequence[Job], console: Console) -> Dataset:
    """The data of all candidates. Raises: ConfigError: they differ."""
    places = {(job.run.data.source, str(job.run.data.options)) for job in jobs}
    expect("data", sorted(places), len(places) == 1, "the same for all candidates")
    run = jobs[0].run
    for field in ("budget_ledger", "limit_epsilon"):  # the selection is counted once, with these
        values = {str(getattr(job.run, field)) for job in jobs}
        expect(field, sorted(values), len(values) == 1, "the same for all candidates")
    return load_data(run.data, find_model(run.model.source), console.note)


def _admitted(job: Job, data: Dataset, priced: Priced, out: Path, key: SecretKey) -> ExitStack:
    """Count the selection in the budget ledger, and its evaluations for held-out users."""
    place, limit = place_of(job.run.budget_ledger), job.run.limit_epsilon
    trials = len(priced.event.candidates) if priced.all_once else 0  # else part of the event
    part = (trials * priced.event.slack[0], trials * priced.event.slack[1])
    counted = [("selection", data.train, priced.delta, priced.phases, part, priced.reasons, out)]
    if (noisy := priced.evaluations) is not None and data.eval_users is not None:
        place_of_receipt = out / EVALUATIONS
        make_directory(place_of_receipt)
        cost = (noisy.delta, noisy.phases, noisy.slack, "", place_of_receipt)
        counted.append(("evaluation", data.eval_users, *cost))
    applicants = []
    for kind, users, delta, phases, part, label, directory_of in counted:
        bound = None if limit is None else Limit(limit, delta)
        applicant = BudgetRequest(
            place,
            users.user_ids(),
            kind,
            bound,
            directory_of,
            adjacency=job.privacy.adjacency,
        )
        entry = applicant.entry(key.seal(kind), list(phases), part, label)
        applicant.expect_room(entry)  # of all of them, before any is counted
        applicants.append((applicant, entry))
    with ExitStack() as stack:
        for applicant, entry in applicants:
            stack.enter_context(admitted(applicant, entry))
        return stack.pop_all()


def _trials(jobs: Sequence[Job], priced: Priced, out: Path, key: SecretKey) -> list[Job]:
    """The trials in order, the same whenever they are drawn."""
    rng = key.generator("trials")
    drawn = list(range(len(jobs)))
    if not priced.all_once:
        drawn = rng.integers(0, len(jobs), draw_trials(priced.event, rng)).tolist()
    trials, public = [], priced.evaluations is None
    for number, choice in enumerate(drawn):
        # Names do not reveal the order: the chosen settings are public, their number is not.
        name, job = key.seal(f"trial {number}")[:16], jobs[choice]
        run = changed_run(job.run, run_dir=(out / RUNS / name).absolute(), limit_epsilon=None)
        log = (out / LOGS / f"{name}.txt").absolute()
        trials.append(dataclasses.replace(job, name=name, run=run, log=log, held_out=public))
    return trials


def _score(
    trial: Job, number: int, data: Dataset, priced: Priced, key: SecretKey, console: Console
) -> float:
    """A trial's loss on held-out users, with noise if they are protected; inf without a number."""
    summary = trial.summary
    if summary is None:
        return math.inf
    if priced.evaluations is None or data.eval_users is None:
        loss = float(summary["final_eval_loss"])
        return math.inf if math.isnan(loss) else loss  # nan would compare as no larger than any
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
    """Candidates, data and price that a selection started with; a resumed one must have the same.

    Finished trials are reused. With other settings they would be released at a price that is not
    theirs, and a metric computed without noise would be labelled as one with noise.
    """

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
        adapters = settings.pop("adapter", [None])
        stores = [store for store in (data.train, data.eval_users) if store is not None]
        facts = {
            "candidates": (len(jobs), len(jobs)),
            "data": (source, [store.fingerprint for store in stores]),
            "model": (models, [models, _models_sha256(models)]),
            "adapter": (adapters, [adapters, [*map(peft_files.sha256, adapters)]]),
            **{name: (values, values) for name, values in settings.items()},
            "trials": (event.mean, event.mean),
            "shape": (event.shape, event.shape),
            "eval_epsilon": (eval_epsilon, eval_epsilon),
        }
        self._shown = {name: shown for name, (shown, _) in facts.items()}
        self._seals = {name: key.seal(f"{name} {meant!r}") for name, (_, meant) in facts.items()}

    def expect_same(self, out: Path) -> None:
        """Raise ConfigError unless the selection in `out` started with the same settings."""
        if not (out / BEGAN).exists():
            why = f"one without the trials in {out / RUNS}, which do not say what they began with"
            expect("out", out, not any((out / RUNS).iterdir()), why)
            return
        was = read_json(out / BEGAN)
        again = f"what the selection in {out} began with; another --out is for another selection"
        for name in {**self._seals, **was}:
            expect(name, self._shown.get(name), was.get(name) == self._seals.get(name), again)

    def save(self, out: Path) -> None:
        """Write the digests beside the key."""
        write_json(out / BEGAN, self._seals, mode=0o600)


def _settings(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """Each setting that can change a trial, with its value in each candidate; None: its default."""
    candidates = []
    for job in jobs:
        given = changed(PrivacyConfig, as_dict(job.privacy)) | changed(RunConfig, as_dict(job.run))
        given |= {"algorithm": str(job.algorithm), "model": job.run.model.source}
        # Without defaults, so that a new setting changes no earlier selection.
        candidates.append({name: value for name, value in given.items() if name not in OPERATIONAL})
    names = dict.fromkeys(name for given in candidates for name in given)
    return {name: [given.get(name) for given in candidates] for name in names}


def _models_sha256(sources: Sequence[str]) -> list[str | None]:
    """Digest of each model; each model is read once."""
    digests = {source: model_sha256(find_model(source)) for source in dict.fromkeys(sources)}
    return [digests[source] for source in sources]
