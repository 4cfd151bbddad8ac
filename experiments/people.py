"""What k people together are promised: the accountant's epsilon against group privacy's.

Beyond the paper. ULS and ELS at epsilon = 4 for one user, in settings of the size of the paper's
two data sets and of scotus; epsilon of k users together at the same delta, for k up to 1,000, by
the accountant (docs/theory/people.md), and by group privacy with the best epsilon of one user's
curve. For ELS that ends soon: the deltas that it needs are smaller than the curve resolves.

    python -m experiments.people --scale small     (10 minutes; smoke: 20 s)
"""

import dataclasses
import math
import time

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments import common
from experiments.group_privacy import black_box_epsilon
from experiments.rows import Row, Rows
from fedsim import accounting
from fedsim.accounting import StepEvent, composition

NAME = "people"


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, with epsilon for one user."""

    data: str
    users: int
    delta: float
    cohort: int
    """M of ULS; B of ELS is group_size times as large."""
    group_size: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    cases: tuple[Case, ...] = (
        Case("Stack Overflow", 342_477, 1.13e-9, 512, 16),
        Case("CC-News", 7_400, 2.92e-8, 256, 16),
        Case("scotus", 9_324, 1e-6, 128, 16),
    )
    people: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    num_steps: int = 2_000
    epsilon: float = 4.0


SETTINGS = {
    "smoke": Settings((Case("made up", 1_000, 1e-5, 16, 2),), (1, 2, 10), 100),
    "small": Settings(),
    "paper": Settings(),
}


def run(settings: Settings) -> Rows:
    """A row for each case, algorithm and number of people."""
    return [
        row
        for case in settings.cases
        for algorithm in ("ELS", "ULS")
        for row in _of(settings, case, algorithm)
    ]


def _of(settings: Settings, case: Case, algorithm: str) -> list[Row]:
    most, prob = (case.group_size if algorithm == "ELS" else 1), case.cohort / case.users
    noise = accounting.calibrate_noise(
        lambda sigma: StepEvent(sigma, prob, most),
        epsilon=settings.epsilon,
        delta=case.delta,
        num_steps=settings.num_steps,
        before=[],
    )
    phases: accounting.Phases = [(StepEvent(noise, prob, most), settings.num_steps)]
    rows = []
    for people in settings.people:
        began = time.perf_counter()
        try:
            together = accounting.for_people(phases, people)
            epsilon = accounting.epsilon(together, case.delta)
        except composition.GridTooLargeError:
            epsilon = math.inf
        seconds = time.perf_counter() - began
        rows.append(
            {
                "data": case.data,
                "algorithm": algorithm,
                "people": people,
                "noise_multiplier": noise,
                "epsilon": epsilon,
                "group_privacy": by_group(phases, case.delta, people),
                "seconds": seconds,
            }
        )
    return rows


def by_group(phases: accounting.Phases, delta: float, people: int) -> float:
    """Group privacy from the curve of one user: the composed loss and, for ULS, whose deltas may be
    smaller than that resolves, Renyi divergences."""
    known = accounting.group_epsilon(phases, delta, people)
    ((event, num_steps),) = phases
    assert isinstance(event, StepEvent)
    if event.max_contributions > 1:
        return known
    several = dataclasses.replace(event, max_contributions=people)
    return min(known, black_box_epsilon(several, num_steps, delta))


def check(rows: Rows) -> common.Claims:
    """What holds in every case."""
    several = [row for row in rows if row["people"] > 1]
    known = [row for row in several if math.isfinite(row["epsilon"])]
    tight = [row for row in known if math.isfinite(row["group_privacy"])]
    below = [row["epsilon"] / row["group_privacy"] for row in tight]
    return [
        (
            "the accountant is never above group privacy",
            all(share <= 1 + 1e-3 for share in below),
            f"{min(below):.2f} to {max(below):.2f} of it, where both are known",
        ),
    ]


def plot(rows: Rows) -> Figure:
    """Epsilon by k, a panel for each data set."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(1.5 + 3.2 * len(names), 3.6), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        for algorithm, colour in common.COLOURS.items():
            own = [r for r in rows if r["data"] == name and r["algorithm"] == algorithm]
            people = [row["people"] for row in own]
            for value, look, label in (
                ("epsilon", "o-", f"{algorithm}, accountant"),
                ("group_privacy", "x:", f"{algorithm}, group privacy"),
            ):
                known = [row[value] if row[value] < 1e6 else math.nan for row in own]
                axis.plot(people, known, look, color=colour, label=label, markersize=4)
        axis.set(xscale="log", yscale="log", title=name, xlabel="k users together")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("epsilon at the delta of one user")
    common.legend_below(figure)
    return figure


if __name__ == "__main__":
    common.main(NAME, __doc__, SETTINGS, run, check, {NAME: plot})
