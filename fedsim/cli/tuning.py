"""Commands that choose settings: `fedsim recommend` before a training, `fedsim select` by several
of them."""

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

from fedsim.config import (
    REPEATED,
    DataConfig,
    EngineConfig,
    MechanismConfig,
    ModelConfig,
    Positional,
    PrivacyConfig,
    PrivacyTarget,
    RunConfig,
    UpdateConfig,
    read,
)
from fedsim.errors import expect
from fedsim.run import Terminal, aligned


def recommend(
    target: PrivacyTarget,
    mechanism: MechanismConfig,
    data: DataConfig,
    model: ModelConfig,
    update: UpdateConfig,
    engine: EngineConfig,
    run_dir: Path = Path("runs"),
    users: int = 128,
    plan_only: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    Takes flags of train, which the printed commands repeat. Without --plan-only it looks at the
    data without protection, and says at what.

    Args:
      run_dir: Directory of the runs of the printed commands.
      users: Number of users whose gradients are measured. >= 1.
      plan_only: Read no text, and answer at once: for clip_norm 1, as if every user had 8 examples,
        and with uls, for one example of each user in a step.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"reading data={data.source}, model={model.source}")
    from fedsim.engine import set_threads

    privacy = PrivacyConfig(**vars(target), **vars(mechanism))
    run = RunConfig(data=data, model=model, engine=engine, run_dir=run_dir, **vars(update))
    set_threads(engine)
    from fedsim import tuning
    from fedsim.run import Console

    result = tuning.recommend(privacy, run, Console(), num_users=users, plan_only=plan_only)
    if not json:
        print(tuning.report(result))
    return result


def select(
    out: Path,
    file: Positional[Path | None] = None,
    set: Annotated[tuple[str, ...], REPEATED] = (),
    trials: float | None = None,
    shape: float = 0.0,
    eval_epsilon: float | None = None,
    public_eval: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Train some of several candidate settings, keep the best model, and pay for the choice alone.

    Private selection (Papernot and Steinke 2022): the number of trials is random and secret, each
    trial draws its settings at random, and only the best by the loss on held-out users is kept, in
    best/. A selection that was killed resumes with the same command.

    Args:
      out: Directory for the selection.
      file: TOML or JSON file with settings of train for all candidates. [grid] has lists of values:
        each combination is a candidate. [[runs]] have settings that go together; each is combined
        with the grid.
      set: NAME=VALUE for a setting of all candidates, NAME=VALUE,VALUE,... for the grid; can be
        repeated.
      trials: Expected number of trials. >= 1. Default: the number of candidates.
      shape: Shape of the distribution of the number of trials: 1 is geometric, 0 logarithmic. A
        smaller shape costs less, and more often gives a single trial. > -1.
      eval_epsilon: Evaluate held-out users with noise; all evaluations together cost them this
        epsilon. > 0. This or --public-eval.
      public_eval: Evaluate held-out users without noise, because their texts are public.
      dry_run: List the candidates without training.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"preparing the candidates of {out}")
    from fedsim import tuning
    from fedsim.engine import set_threads

    settings = tuning.expand(read_spec(file, set))
    jobs = tuning.jobs_of(settings, out)
    if dry_run:
        rows = [{"run": job.name, **job.settings} for job in jobs]
        if not json:
            print(*_listed(rows), sep="\n")
        return {"out": str(out), "rows": rows}
    one_of_two = (eval_epsilon is None) == public_eval
    expect("eval_epsilon", eval_epsilon, one_of_two, "a value, or public_eval, and not both")
    positive = eval_epsilon is None or 0 < eval_epsilon < math.inf
    expect("eval_epsilon", eval_epsilon, positive, "> 0 and finite")
    expect("trials", trials, trials is None or 1 <= trials < math.inf, ">= 1")
    expect("shape", shape, -1 < shape < math.inf, "> -1")
    set_threads(jobs[0].run.engine)
    from fedsim.run import Console

    chosen = tuning.Selection(trials, shape, eval_epsilon)
    result = tuning.select(settings, out, chosen, Console())
    if not json:
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
    spec: dict[str, Any] = read(file) if file is not None else {}
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
