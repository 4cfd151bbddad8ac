"""Table 1 (Appendix D): users and examples of the data sets, by split.

The paper's data are not at hand. `smoke` prepares a made-up source with the shape of Stack
Overflow, `small` real stand-ins in shared/data with the same recipes (a court's speakers for Stack
Overflow, links and articles by domain for CC-News); the paper's own rows are printed beside them.

    python -m experiments.table1_datasets --scale small      (half a minute; smoke: 5 seconds)
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from experiments.data import RECIPES, stand_ins, synthetic
from experiments.harness import experiment
from experiments.harness.rows import Row, Rows
from fedsim.data import Dataset, stats


@dataclasses.dataclass(frozen=True)
class Settings:
    share: float
    """Of Stack Overflow's users, made up."""
    stand_ins: tuple[str, ...] = ()


SETTINGS = {
    "smoke": Settings(0.002),
    "small": Settings(0.02, tuple(stand_ins.STAND_INS)),
}
MADE_UP, ASKED_FOR = "Stack Overflow's shape", "Stack Overflow's shape, as asked for"


def rows_of(name: str, recipe: str, dataset: Dataset) -> Rows:
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


def papers_rows() -> Rows:
    """What the paper's table says."""
    rows = []
    for name in ("stack-overflow", "cc-news"):
        for split, about in RECIPES[name].paper.items():
            sizes = dict(zip(("min", "median", "max"), about["sizes"], strict=True))
            totals = {"examples": about["examples"], "users": about["users"]}
            row = {"dataset": f"{name} (paper)", "recipe": name, "split": split}
            rows.append({**row, **totals, **sizes, "tokens": ""})
    return rows


def asked_for(share: float) -> Row:
    """The row that the made-up data are to have."""
    shape = synthetic.STACK_OVERFLOW.scaled(share)
    totals = {"examples": shape.num_examples, "users": shape.num_users}
    sizes = {"min": 1, "median": shape.median, "max": shape.largest}
    named = {"dataset": ASKED_FOR, "recipe": "", "split": "train"}
    return {**named, **totals, **sizes, "tokens": ""}


def run(settings: Settings) -> Rows:
    rows = [*papers_rows(), asked_for(settings.share)]
    with tempfile.TemporaryDirectory() as directory:
        made_up = stand_ins.made_up(settings.share, Path(directory))
        rows += rows_of(MADE_UP, "", made_up)
        if stand_ins.SHARED.is_dir():
            for name in settings.stand_ins:
                recipe, *_ = stand_ins.STAND_INS[name]
                rows += rows_of(name, recipe, stand_ins.prepare(name, Path(directory)))
    return rows


def origins(settings: Settings) -> dict[str, Any]:
    """The files of the stand-ins."""
    return stand_ins.files_of(settings.stand_ins)


if __name__ == "__main__":
    experiment.main(globals())
