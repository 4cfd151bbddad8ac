"""Table 1 (Appendix D): users and examples of the data sets, by split.

Claims: train and test are those the recipes give; users differ by orders of magnitude. The paper's
data are not at hand. `smoke` prepares a made-up source with the shape of Stack Overflow, `paper`
real stand-ins in ../shared/data with the same recipes (a court's speakers for Stack Overflow, links
and articles by domain for CC-News); the paper's own rows are printed beside them.

    python -m experiments.table1_datasets --scale paper      (5 minutes; smoke: 10 seconds)
"""

import math
import tempfile
from pathlib import Path
from typing import Any

from experiments import common
from fedsim.data import synthetic
from fedsim.data.dataset import Dataset, stats
from fedsim.data.recipes import RECIPES

SHARE = {"smoke": 0.002, "small": 0.02, "paper": 0.02}


def rows_of(name: str, recipe: str, dataset: Dataset) -> list[dict[str, Any]]:
    """Table 1's rows of a data set."""
    rows = []
    for split, store in dataset.splits().items():
        found = stats(store)
        sizes = found["examples_per_user"]
        rows.append(
            {
                "dataset": name,
                "recipe": recipe,
                "split": split,
                "examples": found["num_examples"],
                "users": found["num_users"],
                **{key: sizes[key] for key in ("min", "median", "max")},
                "tokens": found["num_tokens"],
            }
        )
    return rows


def papers_rows() -> list[dict[str, Any]]:
    """What the paper's table says."""
    rows = []
    for name in ("stack-overflow", "cc-news"):
        for split, about in RECIPES[name].paper.items():
            sizes = dict(zip(("min", "median", "max"), about["sizes"], strict=True))
            totals = {"examples": about["examples"], "users": about["users"]}
            row = {"dataset": f"{name} (paper)", "recipe": name, "split": split}
            rows.append({**row, **totals, **sizes, "tokens": ""})
    return rows


def run(scale: str) -> list[dict[str, Any]]:
    rows = papers_rows()
    with tempfile.TemporaryDirectory() as directory:
        made_up = common.synthetic_stack_overflow(SHARE[scale], Path(directory))
        rows += rows_of(f"Stack Overflow's shape, {SHARE[scale]:g} of it", "", made_up)
        if scale == "paper" and common.SHARED.is_dir():
            for name, (recipe, *_) in common.STAND_INS.items():
                rows += rows_of(name, recipe, common.prepare(name, Path(directory)))
    return rows


def check(rows: list[dict[str, Any]], scale: str) -> common.Claims:
    """The made-up shape is the table's, and the recipes' splits are as described."""
    shape = synthetic.STACK_OVERFLOW.scaled(SHARE[scale])
    (made_up,) = (row for row in rows if row["dataset"].startswith("Stack Overflow's shape"))
    counts = (made_up["examples"], made_up["users"]) == (shape.num_examples, shape.num_users)
    near = abs(made_up["median"] - shape.median) <= 1 and made_up["max"] == shape.largest
    times = [
        row["max"] / row["median"] for row in rows if row["split"] == "train" and row["users"] > 1e3
    ]
    reserved = [row for row in rows if row["split"] == "eval_examples"]
    kept = all(1 <= row["min"] and row["max"] <= 32 for row in reserved)
    shown = "median {median:g}, largest {max:,}".format(**made_up)
    return [
        ("the made-up data have Stack Overflow's shape", counts and near, shown),
        (
            "the largest user has at least twice the median user's examples",
            min(times, default=2.0) >= 2,
            f"{min(times, default=math.nan):.3g} to {max(times, default=math.nan):.3g} times",
        ),
        ("1 to 32 examples of a user are reserved", kept, f"in {len(reserved)} data sets"),
    ]


def main() -> None:
    scale, out = common.parse_arguments(__doc__)
    rows = run(scale)
    common.finish("table1_datasets", scale, out, rows, {}, check(rows, scale), trains=False)


if __name__ == "__main__":
    main()
