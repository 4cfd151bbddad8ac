"""`fedsim recommend`: which algorithm to use, and how to set it. `fedsim sweep`: many runs."""

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
from fedsim.errors import ConfigError, FedsimError, expect
from fedsim.run import wrapped


@dataclasses.dataclass(frozen=True)
class AdvisedRun(RunConfig):
    """The flags of train, which the commands that are printed take over."""

    run_dir: Path = Path("runs")
    """Where the commands that are printed put their runs."""


@dataclasses.dataclass(frozen=True)
class Recommend(ReadsSources):
    """Which of ELS and ULS to use on some data, and how to set it, for a privacy and a compute
    budget. Looks at the data without protection, and says at what.

    Takes the flags of train, too; the commands that it prints have them.
    """

    target: Flat[PrivacyTarget]
    mechanism: Flat[MechanismConfig]
    run: Flat[AdvisedRun]

    users: int = 128
    """How many users' gradients are looked at. >= 1."""

    plot: Path | None = None
    """A PNG to draw: noise per step against group size, for both."""

    plan_only: bool = False
    """Compute no gradient, and answer at once: clip_norm is 1, and ULS takes an example of each
    user."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        privacy = PrivacyConfig(**vars(self.target), **vars(self.mechanism))
        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.tuning import recommend, report

        result = recommend(
            privacy,
            self.run,
            Console(),
            num_users=self.users,
            plot=self.plot,
            plan_only=self.plan_only,
        )
        if not self.json:
            print(wrapped(report(result)))
        return result


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train many runs side by side, as many at a time as there is room for, into one table.

    The same command goes on with a sweep that was killed: finished runs are not repeated.

    A sweep with seeds is a reproduction, and shows them in its table, in TensorBoard and here. Who
    has seed, settings and data has the key of a run. Runs without a seed show none.
    """

    out: Path
    """Directory for the runs, results.csv, results.json, logs and TensorBoard's table."""

    file: tyro.conf.Positional[Path | None] = None
    """A TOML or JSON file: settings of train for all runs; in [grid] lists of values, every
    combination of which is run; in [[runs]] settings that go together."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE or NAME=VALUE,VALUE,...: a setting of all runs, or of the grid; again for more."""

    at_once: int | None = None
    """Most runs at a time. Default: one per accelerator, or per CPU (per threads_per_worker)."""

    in_turn: bool = False
    """One run after another, each on all workers of the cluster: for runs that would take one
    worker too long."""

    select: Literal["eval/loss"] | None = None
    """Keep the run that is best by this metric, in best/. Needs --private."""

    private: bool = False
    """Choose the best run privately: trials are drawn at random, and how many there are is drawn,
    too, and secret. Only the best is kept, and the choice is paid for (Papernot and Steinke 2022).
    What the metric costs is said by --eval-epsilon or --public-eval."""

    trials: float | None = None
    """Private: the expected number of trials. >= 1. Default: as many as there are settings."""

    shape: float = 0.0
    """Private: shape of the distribution of the number of trials: 1 geometric, 0 logarithmic; the
    smaller, the more often there is one trial, and the cheaper. > -1."""

    eval_epsilon: float | None = None
    """Private: evaluate held-out users with noise, for this epsilon of theirs in all. > 0."""

    public_eval: bool = False
    """Private: the texts of held-out users are public, and evaluated without noise."""

    dry_run: bool = False
    """List the runs, and run nothing."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"preparing the runs of {self.out}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.tuning import expand, jobs_of, sweep

        expect("at_once", self.at_once, self.at_once is None or self.at_once >= 1, ">= 1")
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
                for row in rows:
                    print(*(f"{name}={value}" for name, value in row.items()))
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
        """How a private selection is made; None: there is none to make."""
        if not self.private:
            others = ("select", self.select), ("trials", self.trials), ("shape", self.shape)
            others += ("eval_epsilon", self.eval_epsilon), ("public_eval", self.public_eval)
            for name, value in others:
                expect(name, value, not value, "--private beside it")
            return None
        from fedsim.tuning import Selection

        expect("select", self.select, self.select is not None, "eval/loss, to select by")
        said = (self.eval_epsilon is None) == self.public_eval
        expect("eval_epsilon", self.eval_epsilon, said, "a value, or --public-eval, and not both")
        share, trials, shape = self.eval_epsilon, self.trials, self.shape
        expect("eval_epsilon", share, share is None or 0 < share < math.inf, "> 0 and finite")
        expect("trials", trials, trials is None or 1 <= trials < math.inf, ">= 1")
        expect("shape", shape, -1 < shape < math.inf, "> -1")
        return Selection(trials, shape, share, self.at_once, self.in_turn)


def read_spec(file: Path | None, flags: tuple[str, ...]) -> dict[str, Any]:
    """What a sweep file says, with the settings of --set instead of or beside its own.

    Raises: ConfigError: the file cannot be read, or a flag is not NAME=VALUE.
    """
    spec: dict[str, Any] = {}
    if file is not None:
        read = json.loads if file.suffix == ".json" else tomllib.loads
        try:
            spec = read(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError.of("file", file, f"a TOML or JSON file ({error})") from None
        expect("file", file, isinstance(spec, dict), "settings by name")
    grid = dict(spec.get("grid", {}))
    for flag in flags:
        name, equals, text = flag.partition("=")
        expect("set", flag, bool(name and equals and text), "NAME=VALUE")
        values = [_value(part) for part in text.split(",")]
        grid.pop(name, None)
        if len(values) > 1:
            spec.pop(name, None)
            grid[name] = values
        else:
            spec[name] = values[0]
    return {**spec, "grid": grid}


def _value(text: str) -> Any:
    """The value as TOML reads it: numbers, true and false; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
