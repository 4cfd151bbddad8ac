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

from fedsim import accounting
from fedsim.accounting import (
    Events,
    SelectionEvent,
    StepEvent,
    at_most,
    calibration,
    draw_trials,
    spent,
)
from fedsim.budget import BudgetRequest, Limit, admitted, close, place_of
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    as_dict,
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
from fedsim.files import make_directory, private_directory, read_json, sync_directory, write_json
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.models import PRESETS
from fedsim.noise import CELL_ERRORS, noisy_mean_loss
from fedsim.plan import (
    MAX_PARAMETERS,
    TWO_HELD_OUT,
    Caveat,
    Plan,
    delta_of,
    fill_defaults,
    in_words,
    make_plan,
    method_for,
    noise_of,
    planned_phases,
)
from fedsim.run import (
    RECEIPT,
    Console,
    directory,
    find_model,
    load_data,
    model_sha256,
    verbosity,
)
from fedsim.sampling import graph_of
from fedsim.training import (
    Diverged,
    Purpose,
    expect_runnable,
    facts_of_start,
    open_run,
    prepare_run,
    train,
    user_losses,
)

METRIC = "eval/loss"
RUNS, LOGS = "runs", "logs"
BEST, RESULT, EVALUATIONS, CHOSEN = "best", "selection.json", "evaluations", "chosen.json"
BEGAN = "began.json"
"""File with a keyed digest of each setting, which only the owner of the key can compare: seeds and
data are among the settings."""
OF_SELECTION = {"run_dir", "resume"}
"""Settings of a run that a selection sets itself."""
PLACES = ("model", "tokenizer")

Settings = Mapping[str, Any]
_FLAGS = flags_of(PrivacyConfig) | flags_of(RunConfig)


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
    purpose: Purpose = Purpose.TRAIN
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
    where = "a value in the file"
    expect(", ".join(missing), None, not missing, where)
    privacy, run = configs_of({**given, "run_dir": out})
    run = changed_run(run, data=_whole(run.data.source))
    read = settings_of(privacy) | settings_of(run)
    name = _name(algorithm, {name: read[name] for name in given})
    run = changed_run(
        run,
        **{field: _whole(read[field]) for field in PLACES if read[field] is not None},
        run_dir=out.absolute() / RUNS / name,
        resume=True,
        budget_ledger=place_of(run.budget_ledger),
    )
    shown = {"algorithm": str(algorithm), **{n: to_json(settings[n]) for n in settings}}
    log = out.absolute() / LOGS / f"{name}.txt"
    return Job(name, Algorithm(algorithm), privacy, run, shown, log)


def _whole(source: str) -> str:
    """The source, with the whole path of a file or directory."""
    is_path = source not in PRESETS and Path(source).exists()
    return str(Path(source).absolute()) if is_path else source


def _name(algorithm: str, given: Settings) -> str:
    """Name of a run: a hash of its settings without those at their defaults."""
    kept = {n: to_json(v) for n, v in given.items() if v != _FLAGS[n].default}
    kept = {n: v for n, v in kept.items() if n not in OPERATIONAL or n == "data"}
    text = json.dumps([str(algorithm), original_names(kept)], sort_keys=True)
    return f"{algorithm}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def outcomes_of(jobs: Sequence[Job]) -> Iterator[tuple[Job, FedsimError | None]]:
    """Train the jobs, or resume them, one after another; messages go to the log of each.

    Yields: (job, the error that ended it or None).
    Raises: KeyboardInterrupt: a signal ended a run early; the current step is saved.
    """
    for job in jobs:
        ended = None
        with (
            open(job.log, "a") as log,
            contextlib.redirect_stderr(log),
            verbosity(job.run.output),
        ):
            console = Console()
            try:
                train(
                    job.algorithm,
                    job.privacy,
                    job.run,
                    console,
                    purpose=job.purpose,
                    held_out=job.held_out,
                )
            except FedsimError as error:
                console.note(f"fedsim: error: {error}")
                ended = error
        if ended is None and job.summary is None:
            raise KeyboardInterrupt
        yield job, ended


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
class Evaluations:
    """All evaluations of a selection, as released of the held-out users."""

    noise_multiplier: float
    """sigma of each evaluation."""
    epsilon: float
    delta: float
    phases: Events
    slack: tuple[float, float]
    """Slack of the noise of evaluations; not included in `phases`."""


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
    non_private: tuple[Caveat, ...]
    """Facts that the guarantee of one candidate or another does not cover."""
    evaluations: Evaluations | None = None
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


def price(jobs: Sequence[Job], data: Dataset, how: Selection) -> Priced:
    """Price of a selection among these candidates, before any of them runs.

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
    delta, mean = deltas.pop(), float(how.mean or len(jobs))
    of_trial = (max(p.slack.epsilon for p in plans), max(p.slack.delta for p in plans))
    event = SelectionEvent(candidates, mean, how.shape, of_trial)
    together = [phase for candidate in candidates for phase in candidate]
    priced = Priced(
        event,
        delta,
        accounting.epsilon([(event, 1)], delta),
        accounting.epsilon_with([of_trial] * len(jobs), together, delta),
        max(accounting.epsilon(candidate, delta) for candidate in candidates),
        "; ".join(sorted({plan.reasons for plan in plans} - {""})),
        tuple(dict.fromkeys(fact for plan in plans for fact in (*plan.caveats, *plan.assumptions))),
    )
    if how.eval_epsilon is None:
        return priced
    expect("eval_epsilon", how.eval_epsilon, num_users > 1, TWO_HELD_OUT)
    once = len(jobs) if priced.all_once else None
    evaluations = evaluations_of(
        how.eval_epsilon, delta_of(num_users, delta), mean, how.shape, once=once
    )
    return dataclasses.replace(priced, evaluations=evaluations)


def _planned(job: Job, data: Dataset) -> tuple[Plan, tuple[Any, ...]]:
    """A candidate's plan and events. Raises: ConfigError: it is not allowed in a selection."""
    privacy, run = job.privacy, job.run
    expect("strict", run.strict, not run.strict, "false in a private selection")
    expect_runnable(privacy, run)
    expect("epsilon", privacy.epsilon, math.isfinite(privacy.epsilon), "a finite one")
    share = privacy.group_size_epsilon
    expect("group_size_epsilon", share, share is None, "none in a private selection")
    has_size = privacy.group_size is not None or job.algorithm == Algorithm.ULS
    expect("group_size", None, has_size, "a number in a private selection of els")
    none = "none of a trial, but of the selection"
    expect("eval_epsilon", privacy.eval_epsilon, privacy.eval_epsilon is None, none)
    key = SecretKey.create(run.seed)
    privacy, non_private = fill_defaults(job.algorithm, privacy, data)
    non_private += facts_of_start(run, fresh_model=run.model.source in PRESETS)
    method = method_for(job.algorithm, privacy, data.train, key)
    plan = make_plan(
        job.algorithm, privacy, data.train, method, MAX_PARAMETERS, non_private, data_seal=""
    )
    return plan, tuple(planned_phases(plan, method) or ())


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
        return Evaluations(sigma, epsilon, delta, [(StepEvent(sigma, 1.0), once)], part)
    part = accounting.slack(1, epsilon, delta, CELL_ERRORS)

    def event(sigma: float) -> SelectionEvent:
        return SelectionEvent((((StepEvent(sigma, 1.0), 1),),), mean, shape, part)

    def spend(sigma: float, accuracy: float) -> float:
        return spent([(event(sigma), 1)], delta, accuracy)

    sigma = calibration.calibrate("noise_multiplier", spend, epsilon, 5.0, (1e5, 0.1))
    return Evaluations(sigma, epsilon, delta, [(event(sigma), 1)], (0.0, 0.0))


def sentences(priced: Priced) -> list[str]:
    """Sentences that state the price of a selection."""
    count, noisy = len(priced.event.candidates), priced.evaluations
    best = f"the best of {count} candidates, each trained once"
    if not priced.all_once:
        best = f"the best of a secret number of trials, {priced.event.mean:g} expected, of "
        best += f"{count} candidates"
    costs = (priced.epsilon, priced.epsilon_of_all, priced.epsilon_of_one)
    selected, every, one = (at_most(cost, ".4g") for cost in costs)
    label = f" (no guarantee: {in_words(priced.reasons)})" if priced.reasons else ""
    metric = "was computed without noise: the texts of held-out users were said to be public."
    if noisy is not None:
        metric = "has noise: it costs every held-out user epsilon = "
        metric += f"{at_most(noisy.epsilon, '.4g')} at delta = {at_most(noisy.delta, '.2e')}."
    return [
        f"What is released is {best}: epsilon = {every if priced.all_once else selected} at "
        f"delta = {at_most(priced.delta, '.2e')}{label} for every training user.",
        f"By private selection it costs {selected}, with every candidate trained once and all of "
        f"them released {every}, and one alone {one}.",
        f"Not covered by the guarantee: {'; '.join(map(str, priced.non_private)) or 'nothing'}.",
        f"The metric, {METRIC}, {metric}",
    ]


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
    ended, began = (out / RESULT).exists(), (out / BEGAN).exists()
    expect("out", out, ended or not (out / BEST).exists(), "a directory without a chosen model")
    _expect_place(out)
    jobs = jobs_of(settings, out)
    data = _data(jobs, console)
    priced = price(jobs, data, how)
    if not ended:
        for line in sentences(priced):
            console.note(line)
        if not began:  # a trial that cannot be run would be paid for in vain
            with console.phase("planning the candidates"), verbosity("quiet"):
                for job in jobs:
                    trial = (job.algorithm, job.privacy, job.run, Console())
                    with open_run(*trial, purpose=Purpose.TRIAL) as opened:
                        prepare_run(opened, dry_run=True)
        private_directory("out", out)
        for name in (RUNS, LOGS):
            make_directory(out / name)
        if not began and not (out / KEY).exists():
            SecretKey.create().save(out)
    key = SecretKey.load(out)
    seals = _seals(jobs, data, priced, key)
    if began:
        _expect_same(out, seals)
    if ended:
        for place in (out, out / EVALUATIONS):
            close(place)  # the command may have been interrupted there,
        _keep_best(out)  # or there
        return read_json(out / RESULT)
    with _admitted(jobs[0], data, priced, out, key):
        write_json(out / BEGAN, seals, mode=0o600)  # from here on there may be trials
        trials = _trials(jobs, priced, out, key)
        _run(trials, console)
        scores = [_score(trial, i, data, priced, key, console) for i, trial in enumerate(trials)]
        best = min(range(len(trials)), key=lambda number: scores[number])
        expect("settings", "", math.isfinite(scores[best]), "a trial that ends with a loss")
        result = _result(out, trials[best], scores[best], priced)
        # The choice is made once: from here on the same command only moves files into place. It is
        # written before the ledger says that it is released, and never made anew after that.
        write_json(out / CHOSEN, {"name": trials[best].name}, mode=0o600)
        write_json(out / RESULT, result, mode=0o600)
    _keep_best(out)
    return result


def _run(trials: Sequence[Job], console: Console) -> None:
    """Train the trials that have not finished; an error leaves them to the same command."""
    for trial, error in outcomes_of([trial for trial in trials if trial.summary is None]):
        if error is not None and not isinstance(error, Diverged):
            raise error
        console.note(f"{trial.name} ended")


def _result(out: Path, best: Job, score: float, priced: Priced) -> dict[str, Any]:
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
        "candidates": len(priced.event.candidates),
        "expected_trials": priced.event.mean,
        "shape": priced.event.shape,
        "eval_epsilon": priced.evaluations and priced.evaluations.epsilon,
        "eval_delta": priced.evaluations and priced.evaluations.delta,
        "guarantee": not priced.reasons,
        "non_private": [fact.as_dict() for fact in priced.non_private],
        "claim": "\n".join(sentences(priced)),
    }


def _expect_place(out: Path) -> None:
    """Raise ConfigError if `out` holds anything but a selection, since other trials are deleted."""
    expect("out", out, out.is_dir() or not out.exists(), "a directory")
    if (out / BEGAN).exists() or not out.exists():
        return
    names = {path.name for path in out.iterdir()}
    trials = [path for name in {RUNS, LOGS} & names for path in (out / name).iterdir()]
    # Killed before any trial, it left these.
    others = names - {RUNS, LOGS, KEY, RECEIPT, EVALUATIONS}
    others = {name for name in others if not name.startswith(".") and not name.endswith(".toml")}
    empty = f"an empty directory, or that of a selection, with no {RUNS} but those of {BEGAN}"
    expect("out", out, not others and not trials, empty)


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
    runs = [job.run for job in jobs]
    values = {
        "data": {(run.data.source, str(run.data.options)) for run in runs},
        # The selection is counted once, with these.
        **{n: {str(getattr(run, n)) for run in runs} for n in ("budget_ledger", "limit_epsilon")},
    }
    for field, different in values.items():
        expect(field, sorted(different), len(different) == 1, "the same for all candidates")
    return load_data(runs[0].data, find_model(runs[0].model.source), console.note)


def _admitted(job: Job, data: Dataset, priced: Priced, out: Path, key: SecretKey) -> ExitStack:
    """Count the selection in the budget ledger, and its evaluations for held-out users."""
    place, limit = place_of(job.run.budget_ledger), job.run.limit_epsilon
    trials = len(priced.event.candidates) if priced.all_once else 0  # else part of the event
    part = (trials * priced.event.slack[0], trials * priced.event.slack[1])
    costs = [("selection", data.train, priced.delta, priced.phases, part, priced.reasons, out)]
    if (noisy := priced.evaluations) is not None and data.eval_users is not None:
        make_directory(out / EVALUATIONS)
        cost = (noisy.delta, noisy.phases, noisy.slack, "", out / EVALUATIONS)
        costs.append(("evaluation", data.eval_users, *cost))
    requests = []
    for kind, users, delta, phases, part, label, receipt in costs:
        bound = None if limit is None else Limit(limit, delta)
        request = BudgetRequest(place, users.user_ids(), kind, bound, receipt)
        entry = request.entry(key.seal(kind), list(phases), part, label)
        request.expect_room(entry)  # of all of them, before any is counted
        requests.append((request, entry))
    with ExitStack() as stack:
        for request, entry in requests:
            stack.enter_context(admitted(request, entry))
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
        about = {"purpose": Purpose.TRIAL, "held_out": public}
        trials.append(dataclasses.replace(job, name=name, run=run, log=log, **about))
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
    return noisy_mean_loss(
        user_losses(task, params, "eval_users"),
        bound=math.log(data.train.vocab_size),
        count=data.eval_users.num_users,
        stddev=priced.evaluations.noise_multiplier,
        rng=key.generator("evaluation", number),
    )


def _seals(jobs: Sequence[Job], data: Dataset, priced: Priced, key: SecretKey) -> dict[str, str]:
    """Keyed digests of candidates, data and price, by name."""
    noisy, event = priced.evaluations, priced.event
    models = [job.run.model.source for job in jobs]
    digests = {source: model_sha256(find_model(source)) for source in dict.fromkeys(models)}
    contents = {
        "candidates": [
            {name: value for name, value in job.settings.items() if name not in OPERATIONAL}
            for job in jobs
        ],
        "data": [users.fingerprint for users in (data.train, data.eval_users) if users is not None],
        "model": [digests[source] for source in models],
        "trials": (event.mean, event.shape),
        "eval_epsilon": noisy and noisy.epsilon,
    }
    return {name: key.seal(f"{name} {content!r}") for name, content in contents.items()}


def _expect_same(out: Path, seals: dict[str, str]) -> None:
    """Raise ConfigError unless the selection in `out` began with these candidates, data and price.

    Its trials are reused: with other settings they would be released at a price that is not theirs,
    and a metric without noise would be labelled as one with noise.
    """
    began = read_json(out / BEGAN)
    same = f"those that the selection in {out} began with; another out is for another selection"
    for name in {**seals, **began}:
        expect(name, "others", began.get(name) == seals.get(name), same)
