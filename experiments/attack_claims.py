"""What attack.py tests and draws. Committed before any of its runs.

A cell is judged when both of its seeds are there. Which canaries took part is drawn anew for each
training, so the seeds and algorithms of an epsilon are independent of each other.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows, by
from experiments.harness.verdicts import NOT_SHOWN, Verdict
from experiments.real_model_claims import interval

EPSILONS = math.inf, 8.0, 1.0
ALGORITHMS, SEEDS = ("els", "uls"), 2
SEEN, UNSEEN = 0.9, 0.6
"""Area under the ROC curve of an attack that works, and at most of one that fails."""
MIN_DRAWN = 10.0
"""Times that a secret is drawn in a training, on average, before the attack means anything."""
RESAMPLES = 1_000


def numbers_of(text: str) -> np.ndarray:
    """What a row says of each canary."""
    return np.array([float(each) for each in str(text).split()])


def area(rows: Rows) -> tuple[float, float, float]:
    """(Mean area of these trainings, and its 95 % interval): the canaries of a training are
    compared with each other alone."""
    each = [interval(numbers_of(row["falls_in"]), numbers_of(row["falls_out"])) for row in rows]
    mean = float(np.mean([middle for middle, *_ in each]))
    squares = [((high - low) / 2) ** 2 for _, low, high in each]
    off = math.sqrt(sum(squares)) / len(each)
    return mean, max(0.0, mean - off), min(1.0, mean + off)


def check(rows: Rows) -> common.Claims:
    """Whether the attack sees what it should, and no more."""
    found: list[tuple[str, Verdict, str]] = []
    cells = by(rows, lambda row: (row["epsilon"], row["algorithm"]))
    for algorithm in ALGORITHMS:
        what = f"without noise {algorithm.upper()} shows who took part: the area is above {SEEN:g}"
        found.append((what, *judged(cells.get((math.inf, algorithm), []), SEEDS, above=SEEN)))
    for epsilon in EPSILONS[1:]:
        own = [row for row in rows if row["epsilon"] == epsilon]
        what = f"at epsilon {epsilon:g} the attack fails: the area is at most {UNSEEN:g}"
        found.append((what, *judged(own, SEEDS * len(ALGORITHMS), below=UNSEEN)))
    drawn = [row["texts_drawn"] for row in rows]
    what = f"ours: a canary's secret is drawn {MIN_DRAWN:g} times or more in a training"
    found.append((what, min(drawn) >= MIN_DRAWN, f"{min(drawn):.1f} on average at least"))
    return found


def judged(
    rows: Rows, wanted: int, *, above: float | None = None, below: float | None = None
) -> tuple[Verdict, str]:
    """The verdict on an area, by its interval."""
    if len(rows) < wanted:
        return None, f"{len(rows)} of {wanted} trainings are there"
    middle, low, high = area(rows)
    numbers = f"{middle:.3f} ({low:.3f} to {high:.3f})"
    if above is not None:
        return True if low > above else False if high < above else NOT_SHOWN, numbers
    assert below is not None
    return True if high <= below else False if low > below else NOT_SHOWN, numbers


def roc(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(false, true) positive rates over all thresholds, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([inside, outside, [np.inf]]))[::-1]
    above = [(side[:, None] >= thresholds).mean(axis=0) for side in (outside, inside)]
    return above[0], above[1]


def band(rows: Rows, at: np.ndarray) -> np.ndarray:
    """[3, points]: 2.5 %, mean and 97.5 % of the ROC curve, the mean of the trainings', over
    canaries that are drawn again."""

    def at_rates(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
        return np.interp(at, *roc(inside, outside))

    rng = np.random.default_rng(0)
    pairs = [(numbers_of(row["falls_in"]), numbers_of(row["falls_out"])) for row in rows]
    again = np.array(
        [
            np.mean(
                [at_rates(*(rng.choice(side, len(side)) for side in pair)) for pair in pairs], 0
            )
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    return np.stack([low, np.mean([at_rates(*pair) for pair in pairs], axis=0), high])


def plot(rows: Sequence[Row]) -> Figure:
    """ROC curves, by epsilon, with 95 % bands."""
    epsilons = by(rows, lambda row: row["epsilon"])
    figure, axes = common.panels(1, len(epsilons), 3.3, 3.8, sharey=True)
    at = np.linspace(0, 1, 101)
    for axis, (epsilon, own) in zip(axes[0], epsilons.items(), strict=True):
        for name, each in by(own, lambda row: row["algorithm"]).items():
            low, middle, high = band(each, at)
            (line,) = axis.plot(at, middle, label=name.upper())
            axis.fill_between(at, low, high, alpha=0.2, color=line.get_color(), lw=0)
        axis.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", label="chance")
        title = "no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}"
        axis.set(title=title, xlabel="false positives", aspect="equal")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("true positives")
    axes[0, 0].legend(loc="lower right")
    return figure
