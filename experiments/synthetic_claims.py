"""What synthetic_leaks.py and synthetic_text.py test and draw. Committed before any of their runs.

A claim is judged when all of its cells have their seeds, and says until then how many are there.
"""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows, by

NONE, NO_CLIPPING = "none", "no clipping"
CLEAR = 0.1
"""Nats by which a loss has to fall for the rest to mean anything."""
EPSILONS, SEEDS = (4.0, 8.0), 2


def check_leaks(rows: Rows) -> common.Claims:
    """Silence where a training keeps its promises, and alarms elsewhere."""
    claims: list[tuple[str, bool | None, str]] = []
    for (mistake, epsilon), own in by(rows, lambda row: (row["mistake"], row["epsilon"])).items():
        right = mistake == NONE and not math.isinf(epsilon)
        name = "clipped" if mistake == NONE else "not clipped"
        noise = "without noise" if math.isinf(epsilon) else f"epsilon {epsilon:g}"
        numbers = ", ".join(
            f"{row['users_found_in']} of {row['users_in']} against {row['users_found_out']} of "
            f"{row['users_out']} users by {row['length']} tokens, p {row['p_value']:.2g}"
            for row in own
        )
        what = f"{name}, {noise}: the search {'is silent' if right else 'alarms'}"
        claims.append((what, bool(own[0]["alarm"]) != right, numbers))
    return claims


def plot_leaks(rows: Rows) -> Figure:
    """Share of users of whom something is found, by training, for the longer runs of tokens."""
    longest = max(row["length"] for row in rows)
    own = [row for row in rows if row["length"] == longest]
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for shift, side, label in ((-0.2, "in", "trained on"), (0.2, "out", "held out")):
        shares = [row[f"users_found_{side}"] / max(1, row[f"users_{side}"]) for row in own]
        axis.bar(np.arange(len(own)) + shift, shares, 0.4, label=label)
    names = [
        f"{'clipped' if row['mistake'] == NONE else 'not clipped'}\n"
        + ("no noise" if math.isinf(row["epsilon"]) else f"ε = {row['epsilon']:g}")
        for row in own
    ]
    axis.set_xticks(range(len(own)), names)
    axis.set(ylabel=f"share of users with {longest} tokens found", ylim=(0, 1.02))
    axis.grid(axis="y", alpha=0.3)
    common.legend_below(figure)
    return figure


def check_text(rows: Sequence[Row]) -> common.Claims:
    """What synthetic text is worth, source by source."""
    planned = rows[0]["planned"]
    claims: list[tuple[str, bool | None, str]] = [
        ("ours: all cells were run", len(rows) == planned, f"{len(rows)} of {planned}")
    ]
    for source, of_source in by(rows, lambda row: row["source"]).items():
        for epsilon in EPSILONS:
            own = [row for row in of_source if row["epsilon"] == epsilon]
            whole = len(own) >= SEEDS
            for what, test in TESTS.items():
                held, numbers = test(own) if whole else (None, f"{len(own)} of {SEEDS} seeds")
                claims.append((f"{source}, epsilon {epsilon:g}: {what}", held, numbers))
    return claims


def _learns(rows: Rows) -> tuple[bool, str]:
    falls = [row["untrained"] - row["synthetic"] for row in rows]
    return min(falls) >= CLEAR, ", ".join(f"by {fall:.3f}" for fall in falls)


def _beats_private(rows: Rows) -> tuple[bool, str]:
    leads = [row["real_with_privacy"] - row["synthetic"] for row in rows]
    return min(leads) > 0, ", ".join(f"by {lead:.3f}" for lead in leads)


def _is_behind_real(rows: Rows) -> tuple[bool, str]:
    leads = [row["synthetic"] - row["real_without_privacy"] for row in rows]
    return min(leads) > 0, ", ".join(f"by {lead:.3f}" for lead in leads)


def _is_silent(rows: Rows) -> tuple[bool, str]:
    return not any(row["alarm"] for row in rows), ", ".join(
        f"p {row['p_value']:.2g}" for row in rows
    )


TESTS = {
    "a small model learns from the texts (0.1 nats)": _learns,
    "and more than from users' texts with privacy": _beats_private,
    "and less than from users' texts without": _is_behind_real,
    "the search for training users' texts is silent": _is_silent,
}


def plot_text(rows: Sequence[Row]) -> Figure:
    """Held-out loss of the small model by what it was trained on, for each source."""
    sources = by(rows, lambda row: row["source"])
    figure, axes = common.panels(1, len(sources), 3.6, 3.4)
    names = ("real_without_privacy", "synthetic", "real_with_privacy", "untrained")
    for axis, (source, own) in zip(axes[0], sources.items(), strict=True):
        for name in names:
            points = sorted((row["epsilon"], row[name]) for row in own)
            axis.plot(*zip(*points, strict=True), "o", label=name.replace("_", " "))
        epsilons = sorted({row["epsilon"] for row in own})
        axis.set(title=source, xlabel="ε", xticks=epsilons, xlim=(0, epsilons[-1] + epsilons[0]))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out loss (nats per token)")
    common.legend_below(figure)
    return figure
