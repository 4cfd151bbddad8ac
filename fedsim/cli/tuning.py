"""Commands that choose settings: `fedsim recommend` before a training, `fedsim sweep` by many
runs."""

import dataclasses
import json
import math
import shlex
import tomllib
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsSources
from fedsim.config import MechanismConfig, PrivacyConfig, PrivacyTarget, RunConfig
from fedsim.errors import ConfigError, FedsimError, expect, expect_least, expect_positive
from fedsim.installation import expect_installed
from fedsim.run import aligned, wrapped


@dataclasses.dataclass(frozen=True)
class AdvisedRun(RunConfig):
    """Flags of train, which the printed commands repeat."""

    run_dir: Path = Path("runs")
    """Directory of the runs of the printed commands."""


@dataclasses.dataclass(frozen=True)
class Recommend(ReadsSources):
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    Takes the flags of train; the printed commands repeat them. Without --tune-epsilon or
    --plan-only it looks at the data without protection, and says at what.
    """

    target: Flat[PrivacyTarget]
    mechanism: Flat[MechanismConfig]
    run: Flat[AdvisedRun]

    users: int = 128
    """Number of users whose gradients are measured. >= 1."""

    plot: Path | None = None
    """PNG file to draw: noise per step against group size, for els and uls."""

    plan_only: bool = False
    """Read no text, and answer at once: for clip_norm 1, as if every user had 8 examples, and with
    uls, for one example of each user in a step."""

    tune_epsilon: float | None = None
    """Release what is read off the data (sizes of users, gradient norms) with noise, at this cost
    in epsilon for every user, at the run's delta. It is counted in the ledger of the data, beside
    the training; the printed command then has nothing that was chosen without protection. > 0."""

    forecast: bool = False
    """Also predict how much the held-out loss falls, for these users, for fewer and for more: by
    seven trainings with a quarter of the batch size, which have no guarantee for the data."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        if self.plot is not None:
            expect_installed("matplotlib")
        privacy = PrivacyConfig(**vars(self.target), **vars(self.mechanism))
        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.tuning import recommend, report

        console = Console()
        result = recommend(
            privacy,
            self.run,
            console,
            num_users=self.users,
            plot=self.plot,
            plan_only=self.plan_only,
            tune_epsilon=self.tune_epsilon,
            forecast=self.forecast,
        )
        if not self.json:
            print(wrapped(report(result, verbose=console.verbose)))
        return result


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train many runs, several at a time, and collect their results in one table.

    A sweep that was killed resumes with the same command; finished runs are not repeated.

    The table, TensorBoard and the terminal show the seeds of runs that have one. Anyone with the
    seed, the settings and the data can compute a run's key: use seeds to reproduce results, not to
    protect people.
    """

    out: Path
    """Directory for the runs, results.csv, results.json, logs and TensorBoard's files."""

    file: tyro.conf.Positional[Path | None] = None
    """TOML or JSON file with settings of train for all runs. [grid] has lists of values: each
    combination is a run. [[runs]] have settings that go together; each is combined with the
    grid."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for a setting of all runs, NAME=VALUE,VALUE,... for the grid; can be repeated."""

    at_once: int | None = None
    """Largest number of runs at a time. Default: one per accelerator, or per --threads-per-worker
    CPUs. Where runs set wait_for_workers, an autoscaler is asked for room for as many."""

    in_turn: bool = False
    """Run one after another, each on all workers of the cluster: for runs that are too long for one
    worker."""

    select: Literal["eval/loss"] | None = None
    """Keep the run that is best by this metric, as best/. Needs --private."""

    private: bool = False
    """Select the best run privately (Papernot and Steinke 2022): the number of trials is random and
    secret, each trial draws its settings at random, and only the best is kept. The cost of the
    selection is counted. Needs --eval-epsilon or --public-eval, for the cost of the metric."""

    trials: float | None = None
    """Private: expected number of trials. >= 1. Default: the number of settings."""

    shape: float = 0.0
    """Private: shape of the distribution of the number of trials: 1 is geometric, 0 logarithmic. A
    smaller shape costs less, and more often gives a single trial. > -1."""

    eval_epsilon: float | None = None
    """Private: evaluate held-out users with noise; all evaluations together cost them this epsilon.
    > 0."""

    public_eval: bool = False
    """Private: evaluate held-out users without noise, because their texts are public."""

    dry_run: bool = False
    """List the runs without training."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"preparing the runs of {self.out}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.tuning import expand, jobs_of, sweep

        expect_least(self, at_once=1)
        alone = not self.in_turn or self.at_once is None
        expect("at_once", self.at_once, alone, "nothing: --in-turn runs one at a time")
        spec = read_spec(self.file, self.set)
        settings = expand(spec)
        jobs = jobs_of(settings, self.out)
        if self.dry_run:
            rows = [
                {"run": job.name, "done": job.summary is not None, **job.settings} for job in jobs
            ]
            if not self.json:
                print(*_listed(rows), sep="\n")
            return {"out": str(self.out), "rows": rows}
        chosen = self._selection()
        set_threads(dataclasses.replace(jobs[0].run.engine, kind="ray"))  # they compute elsewhere
        from fedsim.run import Console

        if chosen is not None:
            from fedsim.tuning import select

            result = select(settings, self.out, chosen, Console())
            if not self.json:
                print(result["claim"], f"the best one: {result['best']}", sep="\n")
            return result
        rows = sweep(settings, self.out, Console(), at_once=self.at_once, in_turn=self.in_turn)
        failed = [row for row in rows if row["status"] == "failed"]
        if failed:
            raise FedsimError(
                f"{len(failed)} of {len(rows)} runs failed, the first of them: "
                f"{failed[0]['error']} (see {self.out / 'results.csv'})"
            )
        if not self.json:
            print(f"{len(rows)} runs: {self.out / 'results.csv'}")
            print(f"tensorboard --logdir {shlex.quote(str(self.out / 'tb'))}")
        return {"out": str(self.out), "rows": rows}

    def _selection(self) -> Any:
        """Settings of the private selection; None without --private.

        Raises:
          ConfigError: a flag of it is given without --private, or is wrong.
        """
        if not self.private:
            unused = ("select", self.select), ("trials", self.trials), ("shape", self.shape)
            unused += ("eval_epsilon", self.eval_epsilon), ("public_eval", self.public_eval)
            for name, value in unused:
                expect(name, value, not value, "--private beside it")
            return None
        from fedsim.tuning import Selection

        expect("select", self.select, self.select is not None, "eval/loss, to select by")
        one_of_two = (self.eval_epsilon is None) == self.public_eval
        expect(
            "eval_epsilon", self.eval_epsilon, one_of_two, "a value, or --public-eval, and not both"
        )
        expect_positive(self, "eval_epsilon")
        trials, shape = self.trials, self.shape
        expect("trials", trials, trials is None or 1 <= trials < math.inf, ">= 1")
        expect("shape", shape, -1 < shape < math.inf, "> -1")
        return Selection(trials, shape, self.eval_epsilon, self.at_once, self.in_turn)


def _listed(rows: list[dict[str, Any]]) -> list[str]:
    """The runs of a sweep as lines: settings that all share, then a table of the others."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "run"]
    values = {name: {str(row.get(name, "")) for row in rows} for name in names}
    shared = [name for name in names if name != "done" and len(values[name]) == 1]
    varying = [name for name in names if name != "done" and name not in shared]
    done = sum(row["done"] for row in rows)
    same = " ".join(f"{name}={rows[0][name]}" for name in shared)
    table = [("run", "state", *varying)]
    for row in rows:
        state = "finished" if row["done"] else "to do"
        table.append((row["run"], state, *(str(row.get(name, "")) for name in varying)))
    counted = f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {done} of them finished"
    return [f"{counted}; all with {same}", *aligned(table)]


def read_spec(file: Path | None, flags: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a sweep: those of a file, overridden and completed by --set.

    Args:
      file: TOML or JSON; None: there is none.
      flags: values of --set.

    Returns:
      Settings by name, with lists of values under "grid".

    Raises:
      ConfigError: the file cannot be read, or a flag is not NAME=VALUE.
    """
    spec: dict[str, Any] = {}
    if file is not None:
        read = json.loads if file.suffix == ".json" else tomllib.loads
        try:
            spec = read(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError.of("file", file, f"a TOML or JSON file ({error})") from None
        expect("file", file, isinstance(spec, dict), "settings by name")
    from fedsim.tuning import expand

    expand(spec)  # says what is wrong with its grid or runs
    grid, runs = dict(spec.get("grid", {})), [dict(run) for run in spec.get("runs", ())]
    for flag in flags:
        name, equals, text = flag.partition("=")
        expect("set", flag, bool(name and equals and text), "NAME=VALUE")
        values = [_value(part) for part in text.split(",")]
        expect("set", flag, name not in ("grid", "runs"), "a setting; these are for the file")
        for given in (grid, *runs):  # else they would take precedence
            given.pop(name, None)
        if len(values) > 1:
            spec.pop(name, None)
            grid[name] = values
        else:
            spec[name] = values[0]
    return {**spec, "grid": grid, **({"runs": runs} if runs else {})}


def _value(text: str) -> Any:
    """A number or boolean as TOML reads it; anything else stays text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
