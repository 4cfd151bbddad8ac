"""Figure 10: how many users have how many examples, as a PNG."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedsim.data.users import UserStore
from fedsim.errors import DataError

BINS = 40


def bins(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(edges [bins + 1], users [bins]) of examples per user, in bins of equal ratio."""
    top = max(int(sizes.max(initial=1)), 1)
    edges = np.unique(np.floor(np.geomspace(1, top + 1, BINS + 1)).astype(np.int64))
    return edges, np.histogram(sizes, edges)[0]


def draw(stores: Mapping[str, UserStore], file: Path) -> None:
    """Writes a panel for each store; equal data give equal files.

    Raises: DataError: `file` is no PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if file.suffix != ".png":
        raise DataError.of("histogram", file, "a file ending in .png")
    figure = Figure(figsize=(4.5 * len(stores), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(stores), squeeze=False)[0]
    for axis, (name, store) in zip(panels, stores.items(), strict=True):
        sizes = store.examples_per_user
        edges, users = bins(sizes)
        axis.stairs(users, edges, fill=True)
        median = int(np.median(sizes)) if len(sizes) else 0
        axis.axvline(median, color="black", linestyle="--", linewidth=1)
        axis.set(xscale="log", xlabel="examples per user", ylabel="users")
        axis.set(title=f"{name}: {store.num_users:,} users, median {median:,}")
    if not file.absolute().parent.is_dir():
        raise DataError.of("histogram", file, "a file in a directory that exists")
    figure.savefig(file, dpi=120, metadata={"Software": None})
