"""Committed records: what is written beside the rows of an experiment, and held against them.

Rows are as they are in the CSV file: verdicts and figures come from what is written there. So they
can be had again without running anything. Pages of the lab (`docs/lab/`) have them from the record
when the site is built (`docs/records.py`).

    python -m experiments judge      (verdicts and figures again, from the committed CSV files)
"""

import csv
import datetime
import functools
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
FOLDERS = ("small", "long")
"""Of records of other scales than the paper's."""
PROVENANCE = ("commit", "date", "data", "model", "seeds")


def short(value: Any) -> Any:
    """A value as it is in a CSV file: floats with six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else value


def read_value(text: str) -> Any:
    """What `short` wrote: a truth value, a number, a text, or nothing."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def as_written(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as whoever reads the CSV file has them."""
    return [
        {n: read_value("" if v is None else str(short(v))) for n, v in row.items()} for row in rows
    ]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file."""
    with file.open(newline="") as opened:
        rows = csv.DictReader(opened)
        return [{name: read_value(text) for name, text in row.items()} for row in rows]


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


def came_from() -> dict[str, Any]:
    """The commit that was checked out, whether anything but results was changed since, and the
    date. Results change while an experiment appends to them."""
    commit = _git("describe", "--always", "--abbrev=12")
    beside = f":!{RESULTS.relative_to(HERE)}"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", beside)
    return {"commit": f"{commit}-dirty" if changed else commit, "date": _today()}


def seeds_of(settings: Any) -> list[int]:
    """The seeds among settings, in JSON's types; none: nothing in them is drawn by a seed."""
    if isinstance(settings, dict):
        own = settings.get("seeds", [settings["seed"]] if "seed" in settings else [])
        inner = [seeds_of(value) for name, value in settings.items() if name != "seeds"]
        return sorted({*own, *(seed for each in inner for seed in each)})
    return []


def took(record: Mapping[str, Any]) -> str:
    """The minutes of a record: those of one core where runs were kept, each with its own."""
    if "run_minutes" in record:
        return f"{record['run_minutes']:g} minutes of one core"
    return f"{record['minutes']:g} minutes"


def trained_at(trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many there are, of which commits and dates; nothing where rows do not say."""
    commits = list(dict.fromkeys(row["commit"] for row in trainings if "commit" in row))
    dates = sorted({row["date"] for row in trainings if "date" in row})
    return {"number": len(trainings), "commits": commits, "dates": dates} if commits else {}


def committed() -> list[Path]:
    """The records of experiments; those of benchmarks have another form."""
    files = [f for place in ("", *FOLDERS) for f in sorted((RESULTS / place).glob("*.json"))]
    return [file for file in files if not file.stem.startswith("benchmark_")]


def name_of(record: Path) -> str:
    """What pages call a committed record: its experiment, and the scale if there is another."""
    return f"long/{record.stem}" if record.parent.name == "long" else record.stem


@functools.cache
def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
