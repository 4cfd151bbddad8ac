"""What the experiments share: the command line, where results go, CSV files, data sets."""

import argparse
import csv
import dataclasses
import json
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
    seeds_of,
    short,
    took,
    trained_at,
    verdict,
)
from experiments.harness.rows import Rows
from fedsim.data import Dataset, build
from fedsim.errors import DataError, FedsimError, expect
from fedsim.files import sha256_of

RESULTS = Path(__file__).parents[1] / "results"
STARTED = time.time()
SCALES = ("smoke", "small", "paper")
COLOURS = {"ELS": "tab:blue", "ULS": "tab:orange"}

Claims = Sequence[tuple[str, Verdict, str]]
"""What is claimed, whether it held (None: that is not known yet), and the numbers."""
SAYS = {True: "yes", False: "no", NOT_SHOWN: NOT_SHOWN, None: "not judged"}
NONE: Mapping[str, Any] = MappingProxyType({})

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


def add_arguments(parser: argparse.ArgumentParser, scales: Sequence[str] = SCALES) -> None:
    """--scale, --out and --dry-run, which all experiments have."""
    parser.add_argument("--scale", choices=scales, default="small")
    parser.add_argument("--out", type=Path, help="directory for the CSV, JSON and PNG files")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")


def out_of(arguments: argparse.Namespace) -> Path:
    """The directory for results, which is made if need be; not in a dry run. Those of the smallest
    scale are in a temporary directory."""
    places = {
        "smoke": Path(tempfile.gettempdir()) / "fedsim-experiments" / "smoke",
        "paper": RESULTS,
    }
    out = arguments.out or places.get(arguments.scale) or RESULTS / arguments.scale
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
      plot(rows) or FIGURES, and where it reads real data origins(settings): their files.
      JUDGED_AT_SMOKE: see `always` of `finish`.
    """
    name, figures = name_and_figures(module)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=module["__doc__"], formatter_class=form)
    add_arguments(parser)
    arguments = parser.parse_args()
    own = chosen(module["SETTINGS"], arguments.scale)
    if arguments.dry_run:
        for setting, value in dataclasses.asdict(own).items():
            print(f"{setting:18} {value}")
        print(last_time(name, arguments.scale))
        return
    rows = as_written(module["run"](own))
    drawn = {file: draw(rows) for file, draw in figures.items()}
    origins = module.get("origins")
    finish(
        *(name, arguments.scale, out_of(arguments), own, rows, drawn, module["check"](rows)),
        always=module.get("JUDGED_AT_SMOKE", True),
        data=origins(own) if origins else {},
    )


def chosen(settings: Mapping[str, Any], scale: str) -> Any:
    """The settings of a scale. Raises: ConfigError: there are none."""
    expect("scale", scale, scale in settings, f"one of {', '.join(settings)}")
    return settings[scale]


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
    data: Mapping[str, Any] = NONE,
    model: Mapping[str, Any] | None = None,
    trainings: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write rows (NAME.csv) and figures, say whether the claims held, and write that down with the
    settings, the commit, the date, and what it was run on (NAME.json). `minutes` are this
    process's, for which runs that were kept cost nothing; `run_minutes` are those of all its runs,
    of one worker each.

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
    if run_minutes is not None:
        record["run_minutes"] = run_minutes
    record["claims"] = as_claims(claims, judged)
    record |= {**came_from(), "data": dict(data), "model": model and dict(model)}
    if trained := trained_at(trainings):
        record["trainings"] = trained
    record["seeds"] = seeds_of(record["settings"])
    record |= circumstances("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for what, held, numbers in claims:
        print(f"{what}: {SAYS[verdict(held, judged)]} ({numbers})")
    assert not always or all(verdict(held) is True for _, held, _ in claims)


def shared(name: str) -> Path:
    """The file of some of the real data. Raises: DataError: it is not there."""
    file = SHARED / f"{name}.parquet"
    if not file.exists():
        raise DataError(f"{file} is not there: experiments/README.md says where it comes from")
    return file


def files_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The files of real data and their checksums, for a record; nothing where there are none."""
    found = {}
    for name in names if SHARED.is_dir() else ():
        file = shared(STAND_INS[name][1] if name in STAND_INS else name)
        found[name] = {"file": file.name, "sha256": sha256_of(file)}
    return found


def prepare(name: str, directory: Path, **options: Any) -> Dataset:
    """A stand-in, prepared by its recipe. Args: options: of `build`, instead of the recipe's."""
    recipe, file, given = STAND_INS[name]
    return build(shared(file), directory / name, **options_of(recipe, {**given, **options}))


def synthetic_stack_overflow(share: float, directory: Path) -> Dataset:
    """A made-up source with the shape of a share of Stack Overflow, all of it for training."""
    shape = synthetic.STACK_OVERFLOW.scaled(share)
    files = synthetic.write(directory / "source", shape)
    return build(files, directory / "built", eval_users=0.0, eval_examples=False)
