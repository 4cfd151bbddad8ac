"""Commands that choose settings: `fedsim recommend` before a training, `fedsim select` by several
of them."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import tyro

from fedsim.cli.arguments import Flat, ReadsSources
from fedsim.config import MechanismConfig, PrivacyConfig, PrivacyTarget, RunConfig
from fedsim.errors import ConfigError, expect, expect_positive
from fedsim.run import aligned, wrapped


@dataclasses.dataclass(frozen=True)
class AdvisedRun(RunConfig):
    """Flags of train, which the printed commands repeat."""

    run_dir: Path = Path("runs")
    """Directory of the runs of the printed commands."""


@dataclasses.dataclass(frozen=True)
class Recommend(ReadsSources):
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    Takes the flags of train; the printed commands repeat them. Without --plan-only it looks at the
    data without protection, and says at what.
    """

    target: Flat[PrivacyTarget]
    mechanism: Flat[MechanismConfig]
    run: Flat[AdvisedRun]

    users: int = 128
    """Number of users whose gradients are measured. >= 1."""

    plan_only: bool = False
    """Read no text, and answer at once: for clip_norm 1, as if every user had 8 examples, and with
    uls, for one example of each user in a step."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        privacy = PrivacyConfig(**vars(self.target), **vars(self.mechanism))
        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.tuning import recommend, report

        result = recommend(
            privacy, self.run, Console(), num_users=self.users, plan_only=self.plan_only
        )
        if not self.json:
            print(wrapped(report(result)))
        return result


@dataclasses.dataclass(frozen=True)
class Select:
    """Train some of several candidate settings, keep the best model, and pay for the choice alone.

    Private selection (Papernot and Steinke 2022): the number of trials is random and secret, each
    trial draws its settings at random, and only the best by the loss on held-out users is kept, in
    best/. A selection that was killed resumes with the same command.
    """

    out: Path
    """Directory for the selection."""

    file: tyro.conf.Positional[Path | None] = None
    """TOML or JSON file with settings of train for all candidates. [grid] has lists of values: each
    combination is a candidate. [[runs]] have settings that go together; each is combined with the
    grid."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for a setting of all candidates, NAME=VALUE,VALUE,... for the grid; can be
    repeated."""

    trials: float | None = None
    """Expected number of trials. >= 1. Default: the number of candidates."""

    shape: float = 0.0
    """Shape of the distribution of the number of trials: 1 is geometric, 0 logarithmic. A smaller
    shape costs less, and more often gives a single trial. > -1."""

    eval_epsilon: float | None = None
    """Evaluate held-out users with noise; all evaluations together cost them this epsilon. > 0.
    This or --public-eval."""

    public_eval: bool = False
    """Evaluate held-out users without noise, because their texts are public."""

    dry_run: bool = False
    """List the candidates without training."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"preparing the candidates of {self.out}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.tuning import Selection, expand, jobs_of

        settings = expand(read_spec(self.file, self.set))
        jobs = jobs_of(settings, self.out)
        if self.dry_run:
            rows = [{"run": job.name, **job.settings} for job in jobs]
            if not self.json:
                print(*_listed(rows), sep="\n")
            return {"out": str(self.out), "rows": rows}
        one_of_two = (self.eval_epsilon is None) == self.public_eval
        expect(
            "eval_epsilon", self.eval_epsilon, one_of_two, "a value, or --public-eval, and not both"
        )
        expect_positive(self, "eval_epsilon")
        trials, shape = self.trials, self.shape
        expect("trials", trials, trials is None or 1 <= trials < math.inf, ">= 1")
        expect("shape", shape, -1 < shape < math.inf, "> -1")
        set_threads(jobs[0].run.engine)
        from fedsim.run import Console
        from fedsim.tuning import select

        result = select(settings, self.out, Selection(trials, shape, self.eval_epsilon), Console())
        if not self.json:
            print(result["claim"], f"the best one: {result['best']}", sep="\n")
        return result


def _listed(rows: list[dict[str, Any]]) -> list[str]:
    """The candidates as lines: settings that all share, then a table of the others."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "run"]
    values = {name: {str(row.get(name, "")) for row in rows} for name in names}
    shared = [name for name in names if len(values[name]) == 1]
    varying = [name for name in names if name not in shared]
    same = " ".join(f"{name}={rows[0][name]}" for name in shared)
    table = [("run", *varying)]
    for row in rows:
        table.append((row["run"], *(str(row.get(name, "")) for name in varying)))
    counted = f"{len(rows)} candidate{'' if len(rows) == 1 else 's'}"
    return [f"{counted}; all with {same}", *aligned(table)]


def read_spec(file: Path | None, flags: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a selection: those of a file, overridden and completed by --set.

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
