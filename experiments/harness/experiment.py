"""An experiment, from its command line to its rows, figures, verdicts and record."""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from matplotlib.figure import Figure

from experiments.benchmarks.common import circumstances
from experiments.claims import CLAIMS
from experiments.harness.claims import SAYS, judge
from experiments.harness.plots import save_figure
from experiments.harness.records import (
    RESULTS,
    as_written,
    came_from,
    seeds_of,
    took,
    trained_at,
    write_csv,
)
from experiments.harness.rows import Rows
from fedsim.errors import FedsimError, expect

STARTED = time.time()


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


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of the command line, and what follows from them. Experiments that fine-tune have their own
    (finetuning.py)."""

    scale: str
    out: Path
    dry_run: bool

    @classmethod
    def parse(cls, description: str | None, argv: Sequence[str] | None = None) -> Self:
        """--scale, --out and --dry-run."""
        parser = parser_of(description, ("smoke", "small", "paper"))
        given = parser.parse_args(argv)
        return cls(given.scale, out_of(given), given.dry_run)

    def chosen(self, settings: Mapping[str, Any]) -> Any:
        """The settings of the scale. Raises: ConfigError: there are none."""
        expect("scale", self.scale, self.scale in settings, f"one of {', '.join(settings)}")
        return settings[self.scale]

    def rows(self, module: Mapping[str, Any], settings: Any) -> Rows:
        """What the experiment finds; in a dry run nothing, and what it would do is printed."""
        if not self.dry_run:
            return as_written(module["run"](settings))
        for name, value in dataclasses.asdict(settings).items():
            print(f"{name:18} {value}")
        print(last_time(Path(module["__file__"]).stem, self.scale))
        return []

    def titled(self, figure: Figure, rows: Rows) -> Figure:
        """A figure with what a reader must know of its rows."""
        return figure

    def about(self, module: Mapping[str, Any], settings: Any, rows: Rows) -> dict[str, Any]:
        """What `record` is told beside the rows."""
        origins = module.get("origins")
        data = origins(settings) if origins else {}
        return {"always": module.get("JUDGED_AT_SMOKE", True), "data": data}


def parser_of(description: str | None, scales: Sequence[str]) -> argparse.ArgumentParser:
    """With the flags that all experiments have."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--scale", choices=scales, default="small")
    parser.add_argument("--out", type=Path, help="directory for the CSV, JSON and PNG files")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")
    return parser


def out_of(given: argparse.Namespace) -> Path:
    """The directory for results, which is made if need be; not in a dry run. Those of the smallest
    scale are in a temporary directory."""
    smoke = Path(tempfile.gettempdir()) / "fedsim-experiments" / "smoke"
    places = {"smoke": smoke, "paper": RESULTS}
    out = given.out or places.get(given.scale) or RESULTS / given.scale
    if not given.dry_run:
        out.mkdir(parents=True, exist_ok=True)
    return out


@mistakes()
def main(
    module: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    kind: type[Arguments] = Arguments,
) -> None:
    """An experiment, from its command line to its files; with --dry-run it ends before them.

    Args: module: the experiment's globals: SETTINGS by scale, run(settings), plot(rows) or
      FIGURES, and where it reads real data origins(settings): their files.
      JUDGED_AT_SMOKE: see `always` of `record`.
    """
    arguments = kind.parse(module["__doc__"], argv)
    settings = arguments.chosen(module["SETTINGS"])
    rows = arguments.rows(module, settings)
    if arguments.dry_run:
        return
    name, figures = name_and_figures(module)
    drawn = {file: arguments.titled(draw(rows), rows) for file, draw in figures.items()}
    about = arguments.about(module, settings, rows)
    record(name, arguments, settings, rows, drawn, **about)


def name_and_figures(
    module: Mapping[str, Any],
) -> tuple[str, Mapping[str, Callable[[Rows], Figure]]]:
    """(An experiment's name, its figures by their files' names). Args: module: its globals."""
    name, plot = Path(module["__file__"]).stem, module.get("plot")
    return name, module.get("FIGURES", {name: plot} if plot else {})


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


def record(
    name: str,
    arguments: Arguments,
    settings: Any,
    rows: Rows,
    figures: Mapping[str, Figure],
    *,
    always: bool = False,
    run_minutes: float | None = None,
    data: Mapping[str, Any],
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
    judged, out = arguments.scale != "smoke" or always, arguments.out
    write_csv(out / f"{name}.csv", rows)
    for file, figure in figures.items():
        save_figure(figure, out / f"{file}.png")
    found: dict[str, Any] = {"scale": arguments.scale, "settings": dataclasses.asdict(settings)}
    found["minutes"] = round((time.time() - STARTED) / 60, 1)
    if run_minutes is not None:
        found["run_minutes"] = run_minutes
    claims = judge(CLAIMS[name], rows)
    found["claims"] = claims if judged else [{**each, "held": None} for each in claims]
    found |= {**came_from(), "data": dict(data), "model": model and dict(model)}
    if trained := trained_at(trainings):
        found["trainings"] = trained
    found["seeds"] = seeds_of(found["settings"])
    found |= circumstances("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    for each in found["claims"]:
        print("{claim}: {} ({numbers})".format(SAYS[each["held"]], **each))
    assert not always or all(each["held"] is True for each in found["claims"])
