"""Many training runs side by side: a grid or a list of settings, and one table of their results.

A run is identified by its settings. So the same command resumes a sweep that was killed: finished
runs are not repeated, unfinished ones continue from their checkpoints, and a sweep that was
enlarged runs the new settings. Each run computes in one process (engine local), or, in turn, each
on all workers of the cluster; either way it has the same bits as on its own.
"""

import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedsim.budget import place_of
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    as_dict,
    changed_run,
    first_named,
    flags_of,
    renamed,
    run_config,
    to_json,
    typed,
    types_of,
    unknown_setting,
)
from fedsim.errors import ConfigError, FedsimError, expect
from fedsim.files import cache_dir, expand_home, private_directory, write_atomically
from fedsim.installation import is_installed
from fedsim.keys import SecretKey
from fedsim.models import PRESETS
from fedsim.run import REALISED, Console, directory, duration, metrics, speaking

RUNS, LOGS, BOARD, TABLE = "runs", "logs", "tb", "results"
GIVEN_BY_SWEEP = {"run_dir", "resume", "engine", "num_workers"}
COLUMNS = (
    *("epsilon_holds", "delta", "noise_multiplier", "gradient_noise_multiplier", "group_size"),
    *("expected_count", "sampling_prob", "clip_norm", "steps_done", "initial_eval_loss"),
    *("final_eval_loss", "params_sha256"),
)
BUSY_S = 60.0  # for a process of a killed sweep to release the lock of its run

Settings = Mapping[str, Any]
_FLAGS = flags_of(PrivacyConfig) | flags_of(RunConfig)
PLACES = {"model", "adapter", "tokenizer", "chat_template"}
_DEFAULTS = {name: field.default for name, (_, field) in _FLAGS.items()}
_TYPES = types_of(PrivacyConfig) | types_of(RunConfig)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    algorithm: Algorithm
    privacy: PrivacyConfig
    run: RunConfig
    settings: dict[str, Any]
    """The given settings, in JSON's types."""
    log: Path
    trial: bool = False
    """True for a trial of a private selection."""
    held_out: bool = True
    """True if it is evaluated on held-out users without noise."""

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
    """Settings of each run that a sweep file describes.

    Args:
      spec: settings of all runs; `grid` with lists of values, of which every combination is run;
        `runs` with a list of settings that belong together, each combined with the grid.
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

    Raises: ConfigError: a setting is unknown, missing or out of range, or one that the sweep sets;
      or runs differ only in settings that are no part of their names, such as limits.
    """
    jobs: dict[str, Job] = {}
    for job in (_job(given, out) for given in settings):
        first = as_dict(jobs.setdefault(job.name, job).run)
        for field, value in as_dict(job.run).items():
            one = "one value for runs that differ in nothing else"
            expect(field, value, value == first[field], one)
    return list(jobs.values())


def sweep(
    settings: Sequence[Settings],
    out: Path,
    console: Console,
    *,
    at_once: int | None = None,
    here: bool = False,
    in_turn: bool = False,
) -> list[dict[str, Any]]:
    """Run all jobs that have not finished, write the table and return its rows.

    Rows are in the order of the settings and have `run` (its name), `status` (done, failed or
    waiting), the given settings, COLUMNS of its summary, `spent_epsilon`, non-private results under
    names that say so, and `error`. `out` gets runs/NAME (run directories), logs/NAME.txt,
    results.csv, results.json, and tb/ for TensorBoard; on a cluster all nodes must see it. Only its
    owner can read
    it: the settings are in it, and with the data a seed is a run's key.
    Args:
      at_once: largest number of runs at a time; default: as many as there is room for.
      here: one after another in this process, without Ray.
      in_turn: one after another, each on all workers (engine ray), for runs that are too long for
        one worker. A signal raises KeyboardInterrupt after the current step is saved.
    Raises: ConfigError: a mistake in the settings, before anything is run.
    """
    jobs = jobs_of(settings, out)
    expect("settings", "", bool(jobs), "a run at least")
    todo = [job for job in jobs if job.summary is None]
    _expect_place(out)
    expect_same_inputs(jobs, console)
    if not entries(out):
        private_directory("out", out)
    for name in (LOGS, RUNS):
        (out / name).mkdir(mode=0o700, exist_ok=True)
    errors: dict[str, str] = {}
    for job in jobs:
        if job.summary and not (out / BOARD / job.name).exists():
            _write_session(job, out)
    rows = write_table(jobs, out, errors)
    console.note(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before")
    if not todo:
        return rows
    started = time.monotonic()
    outcomes = outcomes_of(todo, console, at_once=at_once, here=here, in_turn=in_turn)
    for count, (job, result) in enumerate(outcomes, 1):
        if isinstance(result, FedsimError):
            errors[job.name] = " ".join(str(result).split())
        _write_session(job, out, succeeded=job.name not in errors)
        rows = write_table(jobs, out, errors)
        left = (time.monotonic() - started) / count * (len(todo) - count)
        what = f"{job.algorithm} {_varying(job, jobs)}: {_outcome(job, errors)}"
        console.note(f"{count}/{len(todo)} {what}; {duration(max(1.0, left))} left")
    return rows


def _expect_place(out: Path) -> None:
    """Raise ConfigError if `out` holds anything but an earlier sweep."""
    there = entries(out)
    of_sweep = there <= {LOGS} or {RUNS, LOGS} <= there
    expect("out", out, of_sweep, "a new or empty directory, or that of a sweep")


def entries(out: Path) -> set[str]:
    """Names in a directory for results, without hidden files and settings.

    Raises: ConfigError: it is no directory.
    """
    expect("out", out, out.is_dir() or not out.exists(), "a directory")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    return {name for name in names if not name.startswith(".") and not name.endswith(".toml")}


def expect_same_inputs(jobs: Sequence[Job], console: Console) -> None:
    """Load data and models, which builds what has to be built, once for all runs.

    Raises: ConfigError: they do not exist, or differ from those of a finished run: a run's name has
      their places, not their contents.
    """
    from fedsim.models import peft_files
    from fedsim.run import find_model, load_data, model_sha256

    places: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        model = job.run.model
        place = job.run.data.source, str(job.run.data.options), model.source, str(model.adapter)
        places.setdefault(place, []).append(job)
    for same in places.values():
        run = same[0].run
        model = find_model(run.model.source)
        data = load_data(run.data, model, console.note)
        ended = [job.run.run_dir for job in same if job.summary is not None]
        sha256 = model_sha256(model) if ended else None  # reads all of the model
        for run_dir in ended:
            identity, expected = directory.load(run_dir).identity, f"what {run_dir} began with"
            seal = SecretKey.load(run_dir).seal(data.train.fingerprint)
            expect("data", run.data.source, seal == identity.data_seal, expected)
            expect("model", run.model.source, sha256 == identity.model, expected)
            adapter = run.model.adapter
            expect("adapter", adapter, peft_files.sha256(adapter) == identity.adapter, expected)


def outcomes_of(
    jobs: Sequence[Job],
    console: Console,
    *,
    at_once: int | None = None,
    here: bool = False,
    in_turn: bool = False,
) -> Iterator[tuple[Job, Any]]:
    """Run the jobs as `sweep` does: yields (job, its summary or the FedsimError that ended it)."""
    if here or in_turn:
        return _in_turn(jobs, "local" if here else "ray")
    return _side_by_side(jobs, console, at_once)


def _side_by_side(
    jobs: Sequence[Job], console: Console, at_once: int | None
) -> Iterator[tuple[Job, Any]]:
    """Yield (job, its summary or the FedsimError that ended it) as jobs end."""
    from fedsim.engine import ParallelRuns

    first, engines = jobs[0].run, [job.run.engine for job in jobs]
    side = ParallelRuns(
        at_once=at_once,
        threads=max(each.threads_per_worker for each in engines),
        devices=max(each.num_devices or 0 for each in engines) or None,
        accelerator=first.engine.accelerator,
        wait_s=first.engine.wait_for_workers,
        cache_dir=cache_dir() / "compiled",
        warn=console.warn,
    )
    try:
        console.note(
            f"{side.placement.num_workers} at a time, each with {side.placement.describe()}"
        )
        for index, result in side.run(train_one, jobs):
            yield jobs[index], result
    finally:
        side.close()


def _in_turn(jobs: Sequence[Job], engine: Literal["ray", "local"]) -> Iterator[tuple[Job, Any]]:
    """Yield the outcomes of jobs that run one after another, from this process.

    Raises: KeyboardInterrupt: a signal ended a run early; the current step is saved.
    """
    for job in jobs:
        run = changed_run(job.run, engine=engine)
        try:
            result = train_one(dataclasses.replace(job, run=run))
        except FedsimError as error:
            result = error
        else:
            if job.summary is None:
                raise KeyboardInterrupt
        yield job, result


def train_one(job: Job) -> dict[str, Any]:
    """Train, or resume a run; its messages go to the job's log. Runs in a separate process."""
    from fedsim.training import train

    level = speaking(job.run.output)
    with open(job.log, "a") as log, contextlib.redirect_stderr(log), level:
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                console = Console(log_every=job.run.log_every)
                return train(
                    job.algorithm,
                    job.privacy,
                    job.run,
                    console,
                    trial=job.trial,
                    held_out=job.held_out,
                )
            except directory.Busy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
            except FedsimError as error:
                console.note(f"fedsim: error: {error}")
                raise


def write_table(jobs: Sequence[Job], out: Path, errors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Write results.csv and results.json from the runs' summaries; return the rows."""
    names = list(dict.fromkeys(name for job in jobs for name in job.settings))
    rows = []
    for job in jobs:
        summary = job.summary or {}
        status = "done" if summary else "failed" if job.name in errors else "waiting"
        given = {name: job.settings.get(name) for name in names}
        came = {name: summary.get(name, given.get(name)) for name in COLUMNS}
        came["spent_epsilon"] = summary.get("epsilon")
        end = {f"non_private/{name}": summary.get(name) for name in REALISED}
        end["error"] = errors.get(job.name)
        rows.append({"run": job.name, "status": status, **given, **came, **end})
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # Settings are shown, and with the data a seed is a run's key.
    write_atomically(out / f"{TABLE}.csv", text.getvalue().encode(), mode=0o600)
    write_atomically(
        out / f"{TABLE}.json", (json.dumps(rows, indent=1) + "\n").encode(), mode=0o600
    )
    return rows


def _job(settings: Settings, out: Path) -> Job:
    settings = renamed(settings)
    given = dict(settings)
    for name in GIVEN_BY_SWEEP & given.keys():
        raise ConfigError.of(name, given[name], "nothing, it is the sweep's own")
    for name in given.keys() - _DEFAULTS.keys() - {"algorithm"}:
        raise unknown_setting(name, given[name], _DEFAULTS)
    algorithm = given.pop("algorithm", None)
    expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
    given = {
        name: typed(name, value, _TYPES[name]) for name, value in given.items() if value is not None
    }
    missing = [name for name in ("data", "epsilon", "num_steps") if name not in given]
    where = "a value in the file or as --set NAME=VALUE"
    expect(", ".join(missing), None, not missing, where)
    given["data"] = _whole("data", given["data"])
    name = identity(algorithm, given)
    given |= {field: _whole(field, given[field]) for field in PLACES & given.keys()}
    privacy_flags, run_flags = flags_of(PrivacyConfig).keys(), flags_of(RunConfig).keys()
    privacy = PrivacyConfig(**{name: given[name] for name in given.keys() & privacy_flags})
    here = {"run_dir": out.absolute() / RUNS / name, "resume": True, "engine": "local"}
    here["budget_ledger"] = place_of(given.get("budget_ledger"))  # they may run elsewhere
    run = run_config(**{**{n: given[n] for n in given.keys() & run_flags}, **here})
    shown = {"algorithm": str(algorithm), **{n: to_json(settings[n]) for n in settings}}
    log = out.absolute() / LOGS / f"{name}.txt"
    return Job(name, Algorithm(algorithm), privacy, run, shown, log)


def _whole(field: str, source: str) -> str:
    """What a setting names, with the whole path of a file or directory: processes may run
    elsewhere."""
    source = expand_home(field, source)
    is_path = source not in PRESETS and Path(source).exists()
    return str(Path(source).absolute()) if is_path else source


def identity(algorithm: str, given: Settings) -> str:
    """Name of a run: a hash of its settings without those at their defaults."""
    kept = {n: to_json(v) for n, v in given.items() if v != _DEFAULTS[n]}
    kept = {n: v for n, v in kept.items() if n not in OPERATIONAL or n == "data"}
    text = json.dumps([str(algorithm), first_named(kept)], sort_keys=True)
    return f"{algorithm}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _write_session(job: Job, out: Path, *, succeeded: bool = True) -> None:
    """A run's row in TensorBoard: what runs are compared by, held-out losses among it, which have
    noise only with eval_epsilon; and how it ended."""
    if not is_installed("tensorboard"):
        return
    from fedsim.tuning.board import write_session

    records = [
        {n: v for n, v in line.items() if n == "step" or n.startswith(("eval/", "privacy/"))}
        for line in metrics.read(job.run.run_dir)
    ]
    if summary := job.summary:
        end = {"summary/final_eval_loss": summary["final_eval_loss"]}
        records.append({"step": summary["steps_done"], **end})
    write_session(out / BOARD / job.name, job.settings, records, succeeded=succeeded)


def _varying(job: Job, jobs: Sequence[Job]) -> str:
    """The settings of a job in which the jobs differ."""
    shown = {n: v for n, v in job.settings.items() if n != "algorithm"}
    differ = [n for n in shown if len({str(other.settings.get(n)) for other in jobs}) > 1]
    return " ".join(f"{name}={shown[name]}" for name in differ)


def _outcome(job: Job, errors: Mapping[str, str]) -> str:
    if job.name in errors:
        return f"failed: {errors[job.name]}"
    names = ("initial_eval_loss", "final_eval_loss")
    before, after = (float((job.summary or {}).get(name, math.nan)) for name in names)
    return f"eval loss {after:.4g}" if math.isfinite(before) else "done; no users are held out"
