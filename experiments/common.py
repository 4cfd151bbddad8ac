"""What the experiments share: the --scale argument, where results go, CSV files, colours."""

import argparse
import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.figure

RESULTS = Path(__file__).parent / "results"
SCALES = ("smoke", "small", "paper")
COLOURS = {"ELS": "tab:blue", "ULS": "tab:orange"}


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> tuple[str, Path]:
    """(scale, directory for results). Only the paper's scale writes where results are kept."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="paper")
    parser.add_argument("--out", type=Path, help="directory for the CSV and PNG files")
    arguments = parser.parse_args(argv)
    elsewhere = Path(tempfile.gettempdir()) / "fedsim-experiments" / arguments.scale
    out = arguments.out or (RESULTS if arguments.scale == "paper" else elsewhere)
    out.mkdir(parents=True, exist_ok=True)
    return arguments.scale, out


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows under the keys of the first; floats with six significant digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _short(value) for key, value in row.items()})
    print(f"wrote {path}")


def save_figure(figure: matplotlib.figure.Figure, path: Path) -> None:
    """A PNG without software versions or dates in it, so that equal data give equal files."""
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    print(f"wrote {path}")


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
