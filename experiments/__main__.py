"""The experiments by name: what there is, what was found, and runs.

    python -m experiments list                     (a line each: question, scales, recorded minutes)
    python -m experiments status [NAME ...]        (records: verdicts, and whether out of date)
    python -m experiments judge                    (verdicts and figures again, from the rows)
    python -m experiments run NAME ... [FLAGS]     (at --scale small, if FLAGS do not say)

FLAGS are those of the experiment (`python -m experiments.NAME --help`). What was trained is kept,
so a run that was stopped goes on with the same command.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError

HERE = Path(__file__).parent
RECORDED = ("small", "long", "paper")
"""Scales of committed records."""
ESTIMATES = ("seconds_per_gradient",)
"""Settings that no result depends on."""
RATES = [0.0001, 0.001, 0.01, 0.1]
GONE = {"sampling": "poisson", "local_steps": 1, "local_learning_rates": RATES}
"""Settings that old records have, and the value at which they changed nothing."""
RUNS = re.compile(r"\b(experiment|finetuning)\.main\(")


@functools.cache
def names() -> list[str]:
    """Modules that have the command line of an experiment."""
    files = (file for file in sorted(HERE.glob("*.py")) if RUNS.search(file.read_text()))
    return [file.stem for file in files if "\nif __name__" in file.read_text()]


def expect_known(wanted: Sequence[str]) -> None:
    """Raises ConfigError: a name is no experiment's."""
    for name in wanted:
        if name not in names():
            raise ConfigError.of("NAME", name, f"one of {', '.join(names())}")


def question(name: str) -> str:
    """The first line of a module's docstring."""
    about = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    return about.partition("\n")[0]


def settings_of(name: str) -> dict[str, Any]:
    """By scale; nothing where a module has none."""
    return getattr(importlib.import_module(f"experiments.{name}"), "SETTINGS", {})


def stored(name: str) -> dict[str, Path]:
    """The committed records of an experiment, by scale."""
    files = {scale: place_of(name, scale) for scale in RECORDED}
    return {scale: file for scale, file in files.items() if file.exists()}


def place_of(name: str, scale: str) -> Path:
    """The file of an experiment's committed record of a scale, if there is one."""
    return HERE / "results" / ("" if scale == "paper" else scale) / f"{name}.json"


def listed(name: str) -> str:
    """A line of `list`."""
    from experiments.harness import records

    read = {scale: json.loads(file.read_text()) for scale, file in stored(name).items()}
    minutes = [f"{records.took(record)} at {scale}" for scale, record in read.items()]
    scales = ", ".join(settings_of(name)) or "small"
    return f"{name}: {question(name)} [{scales}; {', '.join(minutes) or 'no record'}]"


def status(name: str) -> list[str]:
    """A line for each record of an experiment."""
    from experiments.claims import CLAIMS
    from experiments.harness import claims, records

    lines = []
    for scale, file in stored(name).items():
        record = json.loads(file.read_text())
        counts = Counter(claims.SAYS[each["held"]] for each in record["claims"])
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no claims"
        settings = settings_of(name).get(scale)
        state = "up to date"
        if settings is not None and not is_of(record["settings"], settings):
            state = "out of date: the settings were changed"
        if own := CLAIMS.get(file.stem):
            rows = records.read_rows(file.with_suffix(".csv"))
            if claims.judge(own, rows) != record["claims"]:
                state = "out of date: python -m experiments judge has it again"
            if derived(file) not in (None, rows):
                state = f"out of date: it computes other rows: python -m experiments.{name}"
        lines.append(
            f"{file.stem} ({scale}, {record['date']}, {record['commit']}): {said}; {state}"
        )
    return lines or [f"{name}: no record; python -m experiments run {name}"]


def module_of(record: Path) -> Any:
    """The experiment that made it; None: its study is closed."""
    if not (HERE / f"{record.stem}.py").exists():
        return None
    return importlib.import_module(f"experiments.{record.stem}")


def derived(record: Path) -> list[dict[str, Any]] | None:
    """The rows that its experiment computes today, where that takes seconds."""
    from experiments.harness import records

    module = module_of(record)
    if not getattr(module, "DERIVED", False):
        return None
    return records.as_written(module.run(module.SETTINGS[json.loads(record.read_text())["scale"]]))


def is_of(recorded: Any, settings: Any) -> bool:
    """Whether a record's settings are these. A field that came after it has its default; one that
    says how long it takes plays no part, nor one that is gone since and had its only value."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    if any(GONE.get(name, ...) != recorded[name] for name in set(recorded) - set(fields)):
        return False
    now = json.loads(json.dumps(dataclasses.asdict(settings)))
    for name in set(fields) - set(ESTIMATES):
        value = getattr(settings, name)
        if name not in recorded:
            same = value == fields[name].default
        elif dataclasses.is_dataclass(value):
            same = is_of(recorded[name], value)
        else:
            same = now[name] == recorded[name]
        if not same:
            return False
    return True


def judge() -> None:
    """Write verdicts and figures of all records again."""
    from experiments import finetuning
    from experiments.claims import CLAIMS
    from experiments.harness import claims, experiment, plots, records

    for file in records.committed():
        if file.stem not in CLAIMS:  # its study is closed
            continue
        print(records.name_of(file), flush=True)
        module = module_of(file)
        record, rows = json.loads(file.read_text()), records.read_rows(file.with_suffix(".csv"))
        record["claims"] = claims.judge(CLAIMS[file.stem], rows)
        file.write_text(json.dumps(record, indent=1) + "\n")
        _, figures = experiment.name_and_figures(vars(module))
        for name, draw in figures.items():
            figure = draw(rows)
            if hasattr(module, "finetuning"):
                figure = finetuning.titled(figure, rows, record["scale"])
            plots.save_figure(figure, file.with_name(f"{name}.png"))


def run(wanted: Sequence[str], flags: Sequence[str]) -> int:
    """One after another; the exit code of the first that fails."""
    for name in wanted:
        done = subprocess.run([sys.executable, "-m", f"experiments.{name}", *flags])
        if done.returncode:
            return done.returncode
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments", description=__doc__, formatter_class=form)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    verbs.add_parser("status").add_argument("names", nargs="*", metavar="NAME")
    verbs.add_parser("judge")
    verbs.add_parser("run").add_argument("names", nargs="+", metavar="NAME")
    given, flags = parser.parse_known_args(argv)
    if flags and given.verb != "run":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        return done(given, flags)
    except ConfigError as error:
        print("experiments: error:", error, file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        installed = "pip install -e '.[experiments]'"
        print(f"experiments: error: {error.name} is not installed: {installed}", file=sys.stderr)
        return ConfigError.exit_code


def done(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Do what the command line says; the exit code."""
    expect_known(getattr(given, "names", ()))
    if given.verb == "run":
        return run(given.names, flags)
    if given.verb == "judge":
        judge()
        return 0
    for name in getattr(given, "names", None) or names():
        print(listed(name) if given.verb == "list" else "\n".join(status(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
