"""What the experiments share: the --scale argument, where results go, CSV files, data sets."""

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.figure

from experiments.benchmarks.common import circumstances
from fedsim.data import synthetic
from fedsim.data.build import build
from fedsim.data.dataset import Dataset
from fedsim.data.recipes import options_of

RESULTS = Path(__file__).parent / "results"
STARTED = time.time()
SCALES = ("smoke", "small", "paper")
COLOURS = {"ELS": "tab:blue", "ULS": "tab:orange"}

# Real data that stand in for the paper's: recipe, file, columns; not in the repository.
SHARED = Path(__file__).parents[2] / "shared" / "data"
STAND_INS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scotus": (
        "stack-overflow",
        "scotus.parquet",
        {
            "user_column": "user_id",
            "text_column": "text",
            "order_column": "date",
            "test_from": "2000-01-01",
        },
    ),
    "reddit_links": ("cc-news", "reddit_links.parquet", {"user_column": "user_id"}),
    "reddit_links, 8 or more": (
        "cc-news",
        "reddit_links.parquet",
        {"user_column": "user_id", "min_examples": 8},
    ),
    "allsides_news": ("cc-news", "allsides_news.parquet", {"url_column": "url"}),
}


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> tuple[str, Path]:
    """(scale, directory for results). The smallest scale writes to a temporary directory."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="paper")
    parser.add_argument("--out", type=Path, help="directory for the CSV and PNG files")
    arguments = parser.parse_args(argv)
    elsewhere = Path(tempfile.gettempdir()) / "fedsim-experiments"
    kept = {"smoke": elsewhere / "smoke", "small": RESULTS / "small", "paper": RESULTS}
    out = arguments.out or kept[arguments.scale]
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


Claims = Sequence[tuple[str, bool, str]]
"""What is claimed, whether it held, and the numbers."""


def finish(
    name: str,
    scale: str,
    out: Path,
    rows: Sequence[dict[str, Any]],
    figures: Mapping[str, matplotlib.figure.Figure],
    claims: Claims,
    *,
    trains: bool = True,
) -> None:
    """Write rows (NAME.csv) and figures, say whether the claims held, and write that down with what
    it was run on (NAME.json). `minutes` are this process's: runs that were kept cost none.

    Args: trains: claims are about training that gets somewhere: at the smallest scale they are only
      computed. All others hold at every scale: AssertionError, after everything was written.
    """
    judged = scale != "smoke" or not trains
    write_csv(out / f"{name}.csv", rows)
    for file, figure in figures.items():
        save_figure(figure, out / f"{file}.png")
    record = {"scale": scale, "minutes": round((time.time() - STARTED) / 60, 1)}
    record["claims"] = [
        {"claim": what, "held": bool(held) if judged else None, "numbers": numbers}
        for what, held, numbers in claims
    ]
    record |= circumstances("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for what, held, numbers in claims:
        verdict = ("yes" if held else "no") if judged else "not judged at this scale"
        print(f"{what}: {verdict} ({numbers})")
    assert trains or all(held for _, held, _ in claims)


def prepare(name: str, directory: Path, **options: Any) -> Dataset:
    """A stand-in, prepared by its recipe. Args: options: of `build`, instead of the recipe's."""
    recipe, file, given = STAND_INS[name]
    return build(SHARED / file, directory / name, **options_of(recipe, {**given, **options}))


def synthetic_stack_overflow(share: float, directory: Path) -> Dataset:
    """A made-up source with the shape of a share of Stack Overflow, all of it for training."""
    shape = synthetic.STACK_OVERFLOW.scaled(share)
    files = synthetic.write(directory / "source", shape)
    return build(files, directory / "built", eval_users=0.0, eval_examples=False)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
