"""Figures: panels, axes, legends, and files that equal data give equal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"ELS": "tab:blue", "ULS": "tab:orange"}


def save_figure(figure: Figure, path: Path) -> None:
    """A PNG without software versions or dates in it, so that equal data give equal files; closes
    the figure."""
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    print(f"wrote {path}")


def panels(
    rows: int, columns: int, width: float, height: float, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns]. Args: width, height: inches of a panel; shared: which
    share their axes, as of `plt.subplots`."""
    size = (width * columns, height * rows)
    shared |= {"squeeze": False, "layout": "constrained"}
    return plt.subplots(rows, columns, figsize=size, **shared)


def log2_axis(axis: Axes, values: Iterable[float]) -> None:
    """x on a logarithmic scale, labelled with the values that there are."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(values)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def legend_below(figure: Figure) -> None:
    """One legend for all panels, where it hides nothing; for layout="constrained"."""
    named: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    columns = min(len(named), max(2, int(figure.get_figwidth() / 1.8)))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)
