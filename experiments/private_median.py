"""What a private group size costs ELS: noise, against what a wrong group size costs.

Beyond the paper. By default ELS draws its group size G as a private median of the users' numbers of
texts, for a share of epsilon. For two data sets, epsilon 1, 4 and 8 and several shares: how much
the noise of the training grows; how near the draw is to the median; and what the held-out loss
loses by it. The law of the draw is exact. Losses by G are those of Figure 4's trainings (scale
small), in between them linear in log G, at the nearest epsilon that it has.

    python -m experiments.private_median --scale small     (6 s; smoke: 5 s, made up)
"""

import dataclasses
import math
from typing import Any

import duckdb
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows
from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent
from fedsim.sampling import law_of_median, median_group_size

NAME = "private_median"
LOSSES = common.RESULTS / "small" / "fig04_els_group_size.csv"
MIN_TEXTS = {"scotus": 1, "reddit_links, 8 or more": 8}
DEFAULT = 0.02
"""Share of epsilon of the default."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    sources: tuple[str, ...] = ("scotus", "reddit_links, 8 or more")
    epsilons: tuple[float, ...] = (1.0, 4.0, 8.0)
    shares: tuple[float, ...] = (0.005, 0.01, DEFAULT, 0.05, 0.1)
    delta: float = 1e-6
    num_steps: int = 300
    batch_size: int = 256


JUDGED_AT_SMOKE = False
SETTINGS = {
    "smoke": Settings(("made up",), (4.0,), (DEFAULT, 0.1), num_steps=20),
    "small": Settings(),
    "paper": Settings(),
}


def sizes_of(source: str) -> np.ndarray:
    """The number of texts of each user, int [users]."""
    if source == "made up":
        return np.random.default_rng(0).geometric(1 / 40, 2_000)
    file = str(common.shared(source.partition(",")[0]))
    counts = f"SELECT count(*) AS n FROM '{file}' GROUP BY user_id HAVING n >= {MIN_TEXTS[source]}"
    with duckdb.connect() as base:
        return base.execute(counts).fetchnumpy()["n"].astype(np.int64)


def losses_of(source: str, epsilon: float, batch_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(G, held-out loss), both by G, of Figure 4's trainings; None where it has none."""
    of_dataset = (source.partition(",")[0], batch_size)
    query = "SELECT epsilon, group_size, loss FROM read_csv($1) WHERE dataset = $2 AND budget = $3"
    with duckdb.connect() as base:
        rows = base.execute(query, [str(LOSSES), *of_dataset]).fetchnumpy()
    if not len(rows["epsilon"]):
        return None
    nearest = min(rows["epsilon"], key=lambda value: abs(math.log(value / epsilon)))
    own = rows["epsilon"] == nearest
    groups, losses = rows["group_size"][own].astype(float), rows["loss"][own]
    order = np.argsort(groups)
    return groups[order], losses[order]


def run(settings: Settings) -> Rows:
    """A row for each data set, epsilon and share."""
    return [
        _row(settings, source, sizes_of(source), epsilon, share)
        for source in settings.sources
        for epsilon in settings.epsilons
        for share in settings.shares
    ]


def _row(settings: Settings, source: str, sizes: np.ndarray, epsilon: float, share: float) -> Row:
    median, price = median_group_size(sizes), share * epsilon
    prob = settings.batch_size / (len(sizes) * median)  # places of zero-out
    target: dict[str, Any] = {"epsilon": epsilon, "delta": settings.delta}
    target |= {"num_steps": settings.num_steps}

    def event(noise: float) -> StepEvent:
        return StepEvent(noise, prob, median)

    free = accounting.calibrate_noise(event, before=[], **target)
    paid = accounting.calibrate_noise(event, before=[(PureEvent(price), 1)], **target)
    grid, weights = law_of_median(sizes, price)
    near = np.abs(np.log2(grid / median)) <= 1
    row: Row = {
        "data": source,
        "users": len(sizes),
        "median": median,
        "epsilon": epsilon,
        "share": share,
        "noise": paid / free,
        "within_factor_two": float(weights[near].sum()),
    }
    if (known := losses_of(source, epsilon, settings.batch_size)) is not None:
        groups, losses = np.log(known[0]), known[1]

        def loss_at(group: Any) -> Any:
            return np.interp(np.log(group), groups, losses)

        there = float(loss_at(median))
        row["loss_at_median"] = there
        row["loss_lost"] = float(weights @ loss_at(grid)) - there
        others = (median / 2, 2 * median)
        row["loss_of_half_or_double"] = max(float(loss_at(group)) - there for group in others)
    return row


def check(rows: Rows) -> common.Claims:
    """Of the default share."""
    own = [row for row in rows if row["share"] == DEFAULT]
    lost = [row["loss_lost"] for row in own if "loss_lost" in row]
    return [
        (
            "the default share raises the noise by two per cent at most",
            max(row["noise"] for row in own) <= 1.02,
            f"{min(row['noise'] for row in own):.4f} to {max(row['noise'] for row in own):.4f}",
        ),
        (
            "the draw is within a factor of two of the median with a probability of 0.99",
            min(row["within_factor_two"] for row in own) >= 0.99,
            f"at least {min(row['within_factor_two'] for row in own):.4f}",
        ),
        (
            "the held-out loss loses 0.002 nats by the draw at most, on average",
            max(lost, default=math.nan) <= 0.002,
            f"at most {max(lost, default=math.nan):.5f}",
        ),
    ]


def plot(rows: Rows) -> Figure:
    """Noise, and the probability of a draw near the median, by the share of epsilon."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharex=True)
    names = list(dict.fromkeys(row["data"] for row in rows))
    for number, name in enumerate(names):
        for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
            own = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
            look = {"color": f"C{number}", "alpha": 0.4 + 0.6 / (1 + epsilon / 4)}
            look |= {"marker": "o", "markersize": 4, "label": f"{name}, ε = {epsilon:g}"}
            shares = [row["share"] for row in own]
            axes[0].plot(shares, [row["noise"] for row in own], **look)
            axes[1].plot(shares, [row["within_factor_two"] for row in own], **look)
    axes[0].set(xscale="log", ylabel="noise, relative to a public G")
    axes[1].set(ylabel="draw within a factor of two")
    for axis in axes:
        axis.set_xlabel("share of ε")
        axis.grid(alpha=0.3)
    common.legend_below(figure)
    return figure


if __name__ == "__main__":
    common.main(globals())
