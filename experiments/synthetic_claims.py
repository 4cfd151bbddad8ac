"""What synthetic_text.py tests and draws. Committed before any of its runs.

A claim is judged when all of its cells have their seeds, and says until then how many are there.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows, by

CLEAR = 0.1
"""Nats by which a loss has to fall for the rest to mean anything."""
EPSILONS, SEEDS = (4.0, 8.0), 2


def check(rows: Sequence[Row]) -> common.Claims:
    """What synthetic text is worth, source by source."""
    planned = rows[0]["planned"]
    claims: list[tuple[str, bool | None, str]] = [
        ("ours: all cells were run", len(rows) == planned, f"{len(rows)} of {planned}")
    ]
    for source, of_source in by(rows, lambda row: row["source"]).items():
        for epsilon in EPSILONS:
            own = [row for row in of_source if row["epsilon"] == epsilon]
            whole = len(own) >= SEEDS
            for what, test in (TESTS | (OF_SEARCH if "alarm" in rows[0] else {})).items():
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
}
OF_SEARCH = {"the search for training users' texts is silent": _is_silent}
"""Of rows that have it: of commit bd8366bf and before."""


def plot(rows: Sequence[Row]) -> Figure:
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
