"""Figure 10 (Appendix D): histograms of examples per user in the training splits.

Stack Overflow is drawn from a law fitted to Table 1 (its data are not at hand); at `small` the
stand-ins in shared/data are drawn, too, prepared as table1_datasets does.

    python -m experiments.fig10_dataset_sizes --scale small      (half a minute; smoke: 5 seconds)
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.data import stand_ins, synthetic
from experiments.harness import experiment
from experiments.harness.rows import Rows

BINS = 40  # at most


@dataclasses.dataclass(frozen=True)
class Settings:
    share: float
    """Of Stack Overflow's users; less than 1: written to disk and prepared as data sets are."""
    stand_ins: tuple[str, ...] = ()


SETTINGS = {
    "smoke": Settings(0.002),
    "small": Settings(1.0, ("scotus", "reddit_links, 8 or more")),
}


def sizes_of(settings: Settings) -> dict[str, np.ndarray]:
    """Examples per user of each data set."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if settings.share < 1.0:
            dataset = stand_ins.made_up(settings.share, directory)
            return {"Stack Overflow's shape": np.diff(dataset.train.offsets)}
        found = {"Stack Overflow (fitted)": synthetic.sizes(synthetic.STACK_OVERFLOW)}
        if stand_ins.SHARED.is_dir():
            for stand_in in settings.stand_ins:
                found[stand_in] = np.diff(stand_ins.prepare(stand_in, directory).train.offsets)
        return found


def histogram_bins(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of bins of equal ratio, and the number of users with examples in each bin."""
    edges = np.unique(np.floor(np.geomspace(1, sizes.max() + 1, BINS + 1)).astype(np.int64))
    return edges, np.histogram(sizes, edges)[0]


def run(settings: Settings) -> Rows:
    """A row for each bin of each histogram."""
    rows = []
    for name, sizes in sizes_of(settings).items():
        edges, users = histogram_bins(sizes)
        for low, high, number in zip(edges[:-1], edges[1:], users, strict=True):
            rows.append({"dataset": name, "from": low, "below": high, "users": number})
    return rows


def plot(rows: Rows) -> Figure:
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [row for row in rows if row["dataset"] == name]
        edges = [own[0]["from"], *(row["below"] for row in own)]
        axis.stairs([row["users"] for row in own], edges, fill=True)
        axis.set(xscale="log", xlabel="examples per user", ylabel="users", title=name)
    return figure


def origins(settings: Settings) -> dict[str, Any]:
    """The files of the stand-ins."""
    return stand_ins.files_of(settings.stand_ins)


if __name__ == "__main__":
    experiment.main(globals())
