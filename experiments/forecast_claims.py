"""What forecast.py tests and draws. Committed before any of its runs; since the first of them each
corpus is judged by itself.

The three seeds of a number of users share no draw and no noise, but all gains of an epsilon are
forecast by one curve, so they may be off together.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows, by, over_seeds
from experiments.harness.verdicts import cell_error, mean_error, no_worse

TRAININGS, INSIDE = 24, 21
"""Of the trainings, in their intervals of 95 %: if these are right, with a probability of 0.97."""
SHARE = 0.1
"""Of the gain, that a forecast is claimed to be off by at most, on average."""
MORE = 0.02
"""Nats that the forecast of what more users gain is claimed to be off by at most."""


def whole(rows: Rows) -> Rows:
    """A row for each epsilon and number of users of a corpus: over the seeds, as the tests of
    verdicts.py have it, `loss` being minus the gain."""
    found = []
    for own in by(rows, lambda row: (row["epsilon"], row["times"])).values():
        came = over_seeds([-row["gain"] for row in sorted(own, key=lambda row: row["seed"])])
        found.append({**own[0], **came, "gain": -came["loss"]})
    return found


def check(rows: Rows) -> common.Claims:
    """Whether the gains came as they were forecast."""
    corpora = by(rows, lambda row: row["source"]).items()
    return [
        (f"{source}: {what}", held, numbers)
        for source, own in corpora
        for what, held, numbers in judged(own)
    ]


def judged(rows: Rows) -> common.Claims:
    """The claims, of one corpus."""
    inside = f"{INSIDE} of {TRAININGS} trainings are in their intervals"
    near = f"the forecast is off by less than {SHARE:.0%} of the gain on average"
    more = f"what the most users gain beyond the fewest is forecast within {MORE:g} nats"
    if len(rows) < TRAININGS:
        there = f"{len(rows)} of {TRAININGS} trainings are there"
        return [(what, None, there) for what in (inside, near, more)]
    cells = whole(rows)
    count = sum(row["low"] <= row["gain"] <= row["high"] for row in rows)
    away = np.array([cell["gain"] - cell["forecast"] for cell in cells])
    gain, error = float(np.mean([cell["gain"] for cell in cells])), mean_error(cells)
    room = SHARE * gain - float(np.abs(away).mean())
    numbers = f"{np.abs(away).mean():.4f} of {gain:.4f} nats, standard error {error:.4f}; on "
    numbers += f"average {away.mean():+.4f}"
    steps, said = [], []
    for own in by(cells, lambda cell: cell["epsilon"]).values():
        first, *_, last = sorted(own, key=lambda cell: cell["times"])
        steps.append(last["gain"] - first["gain"])
        said.append(last["forecast"] - first["forecast"])
    spread = float(np.sqrt(2)) * cell_error(cells, ("epsilon",))
    off = np.abs(np.subtract(steps, said))
    pairs = ", ".join(f"{came:.4f} for {was:.4f}" for came, was in zip(steps, said, strict=True))
    return [
        (inside, count >= INSIDE, f"{count} of {len(rows)}"),
        (near, no_worse(room, error, 0.0), numbers),
        (more, no_worse(MORE - off, spread, 0.0), f"{pairs}; standard error {spread:.4f}"),
    ]


def plot(rows: Sequence[Row]) -> Figure:
    """Gains against the number of users, on the forecast and its interval."""
    corpora = by(rows, lambda row: row["source"])
    figure, axes = common.panels(1, len(corpora), 5, 4)
    for axis, (source, of_source) in zip(axes[0], corpora.items(), strict=True):
        for epsilon, own in by(of_source, lambda row: row["epsilon"]).items():
            by_users = {row["num_users"]: row for row in own}
            cells = [by_users[number] for number in sorted(by_users)]
            users, said, low, high = (
                [cell[name] for cell in cells] for name in ("num_users", "forecast", "low", "high")
            )
            (line,) = axis.plot(users, said, label=f"ε = {epsilon:g}: forecast")
            axis.fill_between(users, low, high, alpha=0.2, color=line.get_color(), lw=0)
            gains = [row["num_users"] for row in own], [row["gain"] for row in own]
            axis.plot(*gains, "o", ms=4, color=line.get_color(), label=f"ε = {epsilon:g}: trained")
        axis.set(title=source, xlabel="users")
        common.log2_axis(axis, [row["num_users"] for row in of_source])
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("fall of held-out loss (nats per token)")
    common.legend_below(figure)
    return figure
