"""What the experiments share: the command line, where results go, CSV files, data sets."""

import argparse
import csv
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.benchmarks.common import circumstances
from experiments.data import options_of
from experiments.harness import synthetic
from experiments.harness.claims import NOT_SHOWN, Verdict
from experiments.harness.records import (
    as_claims,
    as_written,
    came_from,
    minutes_run,
    seeds_of,
    seeds_run,
    short,
    took,
    trained_at,
    verdict,
)
from experiments.harness.rows import Rows
from fedsim.config import Algorithm, PrivacyConfig
from fedsim.data import Dataset, build
from fedsim.errors import DataError, FedsimError
from fedsim.files import sha256_of
from fedsim.keys import SecretKey

RESULTS = Path(__file__).parents[1] / "results"
STARTED = time.time()
SCALES = ("smoke", "small", "paper")
DEFAULT_SCALE = "small"
COLOURS = {"ELS": "tab:blue", "ULS": "tab:orange"}

Claims = Sequence[tuple[str, Verdict, str]]
"""What is claimed, whether it held (None: that is not known yet), and the numbers."""
SAYS = {True: "yes", False: "no", NOT_SHOWN: NOT_SHOWN, None: "not judged"}
NO_FIGURES: Mapping[str, Any] = MappingProxyType({})

# Real data that stand in for the paper's: recipe, file, columns; not in the repository.
SHARED = Path(__file__).parents[3] / "shared" / "data"
STAND_INS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scotus": (
        "stack-overflow",
        "scotus",
        {
            "user_column": "user_id",
            "text_column": "text",
            "order_column": "date",
            "test_from": "2000-01-01",
        },
    ),
    "reddit_links": ("cc-news", "reddit_links", {"user_column": "user_id"}),
    "reddit_links, 8 or more": (
        "cc-news",
        "reddit_links",
        {"user_column": "user_id", "min_examples": 8},
    ),
    "allsides_news": ("cc-news", "allsides_news", {"user_column": "domain"}),
}


@contextmanager
def mistakes() -> Iterator[None]:
    """What fedsim refuses, such as data that are not there, ends with one line and its exit code,
    and a signal with one line and exit code 75."""
    try:
        yield
    except FedsimError as error:
        print("experiments: error:", error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("experiments: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(75)  # EX_TEMPFAIL


def planned(
    algorithm: str,
    privacy: PrivacyConfig,
    data: Dataset,
    key: SecretKey,
    params: Any,
    times: int = 1,
    kind: type | None = None,
) -> tuple[Any, Any]:
    """(Plan, ELS or ULS) of a training of these parameters, without a run around it. Args:
    algorithm: els or uls; times: see `comparison.assuming`; kind: a subclass in its place."""
    from experiments.harness.comparison import assuming
    from fedsim.clipping import num_coordinates
    from fedsim.plan import fill_defaults, make_plan, method_for
    from fedsim.plan.planner import METHODS

    base = Algorithm(algorithm)
    if times > 1:
        kind = assuming(kind or METHODS[base], times)
    privacy, _ = fill_defaults(base, privacy, data)
    method = method_for(base, privacy, data.train, key, kind=kind)
    facts = num_coordinates(params), [], ""
    return make_plan(base, privacy, data.train, method, *facts), method


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A training that can begin: settings of its run, the model's file, and what takes part."""

    run: Any
    model: Any
    data: Any
    engine: Any
    plan: Any
    method: Any
    params: Any

    def trained(self, rate: float = 1.0, rows: int = 8) -> tuple[Any, Any]:
        """(The average of the last steps, the last) of the parameters. Args: rate: times that of
        the rule; rows: of one pass."""
        from fedsim.training.optimizers import update_rule

        rule = update_rule(self.run, self.run.learning_rate * rate)
        steps = iterates(self.plan, self.method, self.engine, self.params, rule, rows)
        ema = self.run.ema or 0.0
        last, averages = followed(steps, self.params, [ema])
        return averages[ema], last


def prepared(
    algorithm: str,
    privacy: PrivacyConfig,
    run: Any,
    model: Any,
    data: Dataset,
    task: Any,
    params: Any,
    key: SecretKey,
    times: int = 1,
    kind: type | None = None,
) -> Prepared:
    """A training by the rule's optimizer settings. Args: model: None: it is fresh; times, kind: as
    of `planned`."""
    from fedsim.engine.worker import LocalEngine
    from fedsim.training import with_plan

    plan, method = planned(algorithm, privacy, data, key, params, times, kind)
    run = with_plan(plan, None, run, fresh=model is None)
    return Prepared(run, model, data, LocalEngine(task, num_lanes=1), plan, method, params)


def tokens_of(users: Any, user: int, most: int | None = None) -> list[Any]:
    """Token ids of each text of a user, without padding. Args: most: so many texts, the first."""
    low, high = int(users.offsets[user]), int(users.offsets[user + 1])
    tokens, sizes = users.gather(np.arange(low, high)[:most], users.max_length)
    return [each[:size] for each, size in zip(tokens, sizes, strict=True)]


def facts_of(plan: Any) -> dict[str, Any]:
    """What a row says of the plan that it was trained by."""
    names = ("group_size", "num_users", "num_parameters", "expected_count", "noise_multiplier")
    return {name: getattr(plan, name) for name in (*names, "delta")}


def followed(steps: Iterable[Any], first: Any, emas: Iterable[float]) -> tuple[Any, dict]:
    """(The last parameters, the average of all for each decay) of what `iterates` yields.

    Steps whose parameters are no numbers are left out of the averages.
    """
    from fedsim.training.optimizers import averaged

    params, averages = first, dict.fromkeys(emas, first)
    for step, params in enumerate(steps, 1):  # noqa: B020
        if is_finite(params):
            averages = {ema: averaged(old, params, ema, step) for ema, old in averages.items()}
    return params, averages


def iterates(
    plan: Any, method: Any, engine: Any, params: Any, rule: Any, rows: int = 8
) -> Iterator[Any]:
    """The parameters after each step of a plan, without a run around it; they end where they are
    no numbers any more. Args: rule: the optimizer; rows: of one pass."""
    from fedsim.clipping import Strategy

    options = {
        "clip": plan.clip_at(plan.clip_norm),
        "noise_multiplier": plan.gradient_noise_multiplier,
        "strategy": Strategy("direct", rows),
        "add_noise": plan.add_noise(),
    }

    def gradient(params: Any, step: int) -> Any:
        return method.gradient(params, step, engine, **options)[0]

    return updated(gradient, rule, params, plan.num_steps)


def updated(
    gradient: Callable[[Any, int], Any], rule: Any, params: Any, num_steps: int
) -> Iterator[Any]:
    """The parameters after each step of an optimizer, until they are no numbers.

    Args:
      gradient: (parameters, step) -> `mechanism.NoisyMean`.
      rule: from `optimizers.update_rule`.
    """
    from fedsim.training.optimizers import updater

    update, state = updater(rule), rule.init(params)
    for step in range(num_steps):
        params, state = update(gradient(params, step).values(), state, params)
        yield params
        if not is_finite(params):
            return


def is_finite(params: Any) -> bool:
    """True if all parameters, and their norm, are finite."""
    import optax

    return math.isfinite(float(optax.tree.norm(params)))


def resumable(
    description: str | None, what: str, *, processes: bool = False, **others: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments of an experiment that goes on with rows that were kept: those of
    `add_arguments`, --minutes, after which no `what` is begun, --processes if asked for, and
    others, with the options of each."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=60, help=f"begin no {what} after these")
    if processes:
        parser.add_argument("--processes", type=int, help="side by side; else one for each core")
    for name, options in others.items():
        parser.add_argument(f"--{name}", **options)
    came_from()  # what is committed while it computes is not what it computes
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser, scales: Sequence[str] = SCALES) -> None:
    """--scale, --out and --dry-run, which all experiments have."""
    parser.add_argument("--scale", choices=scales, default=DEFAULT_SCALE)
    parser.add_argument("--out", type=Path, help="directory for the CSV, JSON and PNG files")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")


def at_hand(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Take the scale small where there are no settings for the one that was asked for."""
    if arguments.scale not in settings:
        print("the paper's data are not at hand: this is the scale small, on stand-ins")
        arguments.scale = "small"


def place_of(arguments: argparse.Namespace) -> Path:
    """Where results of a scale are; those of the smallest are in a temporary directory."""
    elsewhere = Path(tempfile.gettempdir()) / "fedsim-experiments"
    kept = {"smoke": elsewhere / "smoke", "paper": RESULTS}
    return arguments.out or kept.get(arguments.scale) or RESULTS / arguments.scale


def out_of(arguments: argparse.Namespace) -> Path:
    """The directory for results, which is made if need be; not in a dry run."""
    out = place_of(arguments)
    if not arguments.dry_run:
        out.mkdir(parents=True, exist_ok=True)
    return out


def name_and_figures(
    module: Mapping[str, Any],
) -> tuple[str, Mapping[str, Callable[[Rows], Figure]]]:
    """(An experiment's name, its figures by their files' names). Args: module: its globals."""
    name, plot = Path(module["__file__"]).stem, module.get("plot")
    return name, module.get("FIGURES", {name: plot} if plot else {})


@mistakes()
def main(module: Mapping[str, Any]) -> None:
    """An experiment, from its command line to its files; those that fine-tune language models have
    their own (finetuning.py).

    Args: module: the experiment's globals: SETTINGS by scale, run(settings), check(rows),
      plot(rows) or FIGURES, and where there are some origins and described, of settings and rows:
      what it was run on, and what was trained. JUDGED_AT_SMOKE: see `always` of `finish`.
    """
    name, figures = name_and_figures(module)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=module["__doc__"], formatter_class=form)
    add_arguments(parser)
    arguments = parser.parse_args()
    at_hand(arguments, module["SETTINGS"])
    own = module["SETTINGS"][arguments.scale]
    if arguments.dry_run:
        for setting, value in dataclasses.asdict(own).items():
            print(f"{setting:18} {value}")
        print(last_time(name, arguments.scale))
        return
    rows = as_written(module["run"](own))
    drawn = {file: draw(rows) for file, draw in figures.items()}
    origins, described = module.get("origins"), module.get("described")
    finish(
        *(name, arguments.scale, out_of(arguments), own, rows, drawn, module["check"](rows)),
        always=module.get("JUDGED_AT_SMOKE", True),
        data=origins(own, rows) if origins else {},
        model=described(own, rows) if described else None,
    )


def last_time(name: str, scale: str) -> str:
    """How long it took when its record in results/ was made."""
    if scale == "smoke":
        return "seconds"
    for directory in (RESULTS / "small", RESULTS)[scale == "paper" :]:
        try:
            record = json.loads((directory / f"{name}.json").read_text())
        except OSError:
            continue
        machine = "{machine[cpu_count]} cores of {machine[cpu]}".format(**record)
        return f"the scale {record['scale']} took {took(record)} on {machine}"
    return "there is no record of how long it takes"


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows under the keys of all, empty where a row has none; floats with six significant
    digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: short(value) for key, value in row.items()})
    print(f"wrote {path}")


def save_figure(figure: Figure, path: Path) -> None:
    """A PNG without software versions or dates in it, so that equal data give equal files; closes
    the figure."""
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    print(f"wrote {path}")


def panels(
    rows: int, columns: int, width: float, height: float, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns]. Args: width, height: inches of a panel; shared: which
    share their axes, as of `plt.subplots`."""
    size = (width * columns, height * rows)
    shared |= {"squeeze": False, "layout": "constrained"}
    return plt.subplots(rows, columns, figsize=size, **shared)


def log2_axis(axis: Axes, values: Iterable[float]) -> None:
    """x on a logarithmic scale, labelled with the values that there are."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(values)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def legend_below(figure: Figure) -> None:
    """One legend for all panels, where it hides nothing; for layout="constrained"."""
    named: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    columns = min(len(named), max(2, int(figure.get_figwidth() / 1.8)))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)


def finish(
    name: str,
    scale: str,
    out: Path,
    settings: Any,
    rows: Rows,
    figures: Mapping[str, Figure],
    claims: Claims,
    *,
    always: bool = False,
    run_minutes: float | None = None,
    data: Mapping[str, Any] = NO_FIGURES,
    model: Mapping[str, Any] | None = None,
    trainings: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write rows (NAME.csv) and figures, say whether the claims held, and write that down with the
    settings, the commit, the date, and what it was run on (NAME.json). `minutes` are this
    process's, for which runs that were kept cost nothing; `run_minutes` are those of all its runs,
    of one worker each, by default of its trainings.

    Args:
      always: the claims hold at every scale: AssertionError, after everything was written. Those
        about training that gets somewhere are not judged at the smallest scale.
      data: fingerprints by the data sets' names; model: what was started from, and its size.
      trainings: the rows that were kept, one of each, where rows are not from this process.
    """
    judged = scale != "smoke" or always
    write_csv(out / f"{name}.csv", rows)
    for file, figure in figures.items():
        save_figure(figure, out / f"{file}.png")
    record: dict[str, Any] = {"scale": scale, "settings": dataclasses.asdict(settings)}
    record["minutes"] = round((time.time() - STARTED) / 60, 1)
    if (minutes := minutes_run(trainings) if run_minutes is None else run_minutes) is not None:
        record["run_minutes"] = minutes
    record["claims"] = as_claims(claims, judged)
    record |= {**came_from(), "data": dict(data), "model": model and dict(model)}
    if trained := trained_at(trainings):
        record["trainings"] = trained
    record["seeds"] = seeds_run(trainings) or seeds_of(record["settings"])
    record |= circumstances("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for what, held, numbers in claims:
        print(f"{what}: {SAYS[verdict(held, judged)]} ({numbers})")
    assert not always or all(verdict(held) is True for _, held, _ in claims)


def shared(name: str) -> Path:
    """The file of some of the real data. Raises: DataError: it is not there."""
    file = SHARED / f"{name}.parquet"
    if not file.exists():
        remedy = f"python -m experiments.stand_ins {name} --download builds it"
        raise DataError(f"{file} is not there: {remedy}")
    return file


def files_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The files of real data and their checksums, for a record; nothing where there are none."""
    found = {}
    for name in names if SHARED.is_dir() else ():
        found[name] = checksum(shared(STAND_INS[name][1] if name in STAND_INS else name))
    return found


def checksum(file: Path) -> dict[str, str]:
    """A file's name and sha256, for a record."""
    return {"file": file.name, "sha256": sha256_of(file)}


def origin(source: str, fingerprint: str) -> dict[str, str]:
    """Of data that were built of a source, for a record: pydocs are no file."""
    files_there = files_of([source] if source != "pydocs" else [])
    return {"fingerprint": fingerprint, **files_there.get(source, {})}


def prepare(name: str, directory: Path, **options: Any) -> Dataset:
    """A stand-in, prepared by its recipe. Args: options: of `build`, instead of the recipe's."""
    recipe, file, given = STAND_INS[name]
    return build(shared(file), directory / name, **options_of(recipe, {**given, **options}))


def synthetic_stack_overflow(share: float, directory: Path) -> Dataset:
    """A made-up source with the shape of a share of Stack Overflow, all of it for training."""
    shape = synthetic.STACK_OVERFLOW.scaled(share)
    files = synthetic.write(directory / "source", shape)
    return build(files, directory / "built", eval_users=0.0, eval_examples=False)
