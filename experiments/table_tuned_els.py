"""ELS with one example of each user, and with its best group size, against ULS.

Beyond the paper, which compares ULS with ELS at the median user's number of examples (Figure 6). No
training: the rows are those of Figures 4 and 5 in results/small, at the budget and the epsilons
that both have, where ULS takes one example of each user. Which is better is reported, not claimed:
a lead counts beyond what the seeds explain.

    python -m experiments.table_tuned_els --scale small      (a second, at every scale)
"""

import dataclasses
import json
from typing import Any

from experiments.harness import common
from experiments.harness.claims import ahead, both
from experiments.harness.records import RESULTS, read_rows
from experiments.harness.rows import ERRORS, Rows, margin


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which cells of both figures."""

    dataset: str = "scotus"
    budget: int = 64
    seeds: tuple[int, ...] = (0, 1)
    """Of the rows of both."""


RUNS_OF = ("fig04_els_group_size", "fig05_uls_heatmap")
DERIVED = True
"""Its rows follow from other records, and have to be what they give."""
JUDGED_AT_SMOKE = False
SETTINGS = {scale: Settings() for scale in ("smoke", "small")}


def run(settings: Settings) -> Rows:
    """A row for each epsilon."""
    small = RESULTS / "small"
    els, uls = (
        [row for row in read_rows(small / f"{name}.csv") if row["dataset"] == settings.dataset]
        for name in RUNS_OF
    )
    noise, rows = max(margin(els), margin(uls)), []
    for epsilon in sorted({row["epsilon"] for row in els} & {row["epsilon"] for row in uls}):
        at = {"epsilon": epsilon, "budget": settings.budget}
        own = {row["group_size"]: row for row in els if at.items() <= row.items()}
        (other,) = (row for row in uls if {**at, "group_size": 1}.items() <= row.items())
        best = min(own, key=lambda group: own[group]["loss"])
        median = own[1]["median_examples"]
        rows.append(
            {
                **{"dataset": settings.dataset, **at, "uls_loss": other["loss"]},
                "els_loss_of_median": own[median]["loss"],
                "els_loss_of_one": own[1]["loss"],
                **{"els_best_group_size": best, "els_best_loss": own[best]["loss"]},
                "noise": noise,
            }
        )
    return rows


def check(rows: Rows) -> common.Claims:
    """ULS's lead over ELS with three group sizes."""
    claims = []
    for what, name in (
        ("the median user's number of examples", "els_loss_of_median"),
        ("one example of each user", "els_loss_of_one"),
        ("its best group size", "els_best_loss"),
    ):
        leads = [row[name] - row["uls_loss"] for row in rows]
        each = [ahead(lead, row["noise"] / ERRORS) for lead, row in zip(leads, rows, strict=True)]
        numbers = f"in {each.count(True)} of {len(leads)}; ahead by {min(leads):.4f} to "
        numbers += f"{max(leads):.4f}, seeds explain {rows[0]['noise']:.4f}"
        claims.append((f"ULS is ahead of ELS with {what}", both(*each), numbers))
    return claims


def of_figures(what: str) -> dict:
    """What the record of the first says of its data or model; the other one's are the same."""
    return json.loads((RESULTS / "small" / f"{RUNS_OF[0]}.json").read_text())[what]


def origins(settings: Settings, rows: Rows) -> dict[str, Any]:
    """Of the data set."""
    return {settings.dataset: of_figures("data")[settings.dataset]}


def described(settings: Settings, rows: Rows) -> dict[str, Any]:
    """The model of the figures."""
    return {"runs_of": RUNS_OF, **of_figures("model")}


if __name__ == "__main__":
    common.main(globals())
