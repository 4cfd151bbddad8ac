"""What law.py predicts, tests and draws. Committed before any of its runs.

The curve was fitted to the 31 private cells of regime.csv and is frozen here. A cell is judged when
both of its fresh seeds are there.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments.harness import common
from experiments.harness.rows import Row, Rows, StandardError, by
from experiments.harness.verdicts import Verdict, ahead, alike, cell_error, mean_error, no_worse
from experiments.regime_claims import ALL, FEW

CURVE = (-0.00156381, 0.12410020, 0.04361727)
"""The gain in nats, as a polynomial of log x, the highest power first. In sample: R^2 0.991."""
RESIDUAL = 0.01339
"""Standard deviation of the 31 gains around the curve (28 degrees of freedom), in nats."""
WITHOUT_NORMS = (-0.00223214, 0.12267278, -0.21659876)
"""The same for M / sigma: the norms left out. In sample: R^2 0.870."""
CELLS, FREEDOM = 20, 28
ERROR = 0.02
"""Nats: what the law is claimed to be off by at most, on average."""
LEADS = 0.08, 0.13
"""Nats by which ULS is expected to be ahead where users are few."""
INSIDE = 17
"""Of the 20 cells, in their intervals of 95 %: if these are right, so many are with a probability
of 0.98."""
SEEDS = 2


def signal(expected_count: float, noise_multiplier: float, norm: float = 1.0) -> float:
    """x = M / (sigma L(G)): of a step, the length of the sum of clipped gradients if all had one
    direction, over the noise of a coordinate, in units of an unclipped gradient's norm."""
    return expected_count / (noise_multiplier * norm)


def gain(x: float, curve: Sequence[float] = CURVE) -> float:
    """What a training is predicted to gain, in nats."""
    return float(np.polyval(curve, math.log(x)))


def half_width() -> float:
    """Of the 95 % interval around a prediction, in nats: how far the 31 cells are from the curve.
    That the curve itself was fitted is left out: it makes it longer by up to 13 %, where x is
    small."""
    return float(stats.t.ppf(0.975, FREEDOM)) * RESIDUAL


def predicted(row: Row) -> Row:
    """What is said of a cell before it is trained. Args: row: its count, noise multiplier, norm."""
    x = signal(row["expected_count"], row["noise_multiplier"], row["norm"])
    plain = signal(row["expected_count"], row["noise_multiplier"])
    return {"x": x, "predicted": gain(x), "predicted_plain": gain(plain, WITHOUT_NORMS)}


def whole(rows: Rows) -> Rows:
    """A row for each cell with all of its fresh seeds: its gain, over the seeds, and its `loss`,
    which is minus the gain, for the tests of verdicts.py."""
    found = []
    for own in by([row for row in rows if row["fresh"]], cell_of).values():
        own = sorted(own, key=lambda row: row["seed"])
        gains = [row["gain_test"] for row in own]
        if len(gains) >= SEEDS:
            each = {"by_seed": " ".join(f"{-gain:.6g}" for gain in gains), "seeds": len(gains)}
            mean, std = float(np.mean(gains)), float(np.std(gains, ddof=1))
            found.append({**own[0], **each, "gain": mean, "loss": -mean, "loss_std": std})
    return found


def cell_of(row: Row) -> tuple:
    """Which of the 20 cells it is of."""
    return tuple(row[name] for name in ("data", "epsilon", "algorithm", "group_size"))


def check(rows: Rows) -> common.Claims:
    """Whether the gains came as they were predicted."""
    cells = whole(rows)
    tests = [*OF_ALL.items()]
    tests += [
        (f"{data}, epsilon {epsilon:g}: {what}", on(test, data, epsilon))
        for what, (test, data, epsilons) in OF_SETTINGS.items()
        for epsilon in epsilons
    ]
    there = f"{len(cells)} of {CELLS} cells have {SEEDS} fresh seeds"
    if len(cells) < CELLS:
        return [(what, None, there) for what, _ in tests]
    found = [(what, *test(cells)) for what, test in tests]
    return [*found, at_the_rule(rows)]


def off(cells: Rows, name: str = "predicted") -> np.ndarray:
    """How far each gain is above its prediction, in nats."""
    return np.array([cell["gain"] - cell[name] for cell in cells])


def error_of(cells: Rows) -> StandardError:
    """Standard error of a cell's gain, for differences within a block."""
    return cell_error(cells, ("data", "epsilon"))


def is_near(cells: Rows) -> tuple[Verdict, str]:
    """The claim of the law."""
    away = off(cells)
    mean = float(np.abs(away).mean())
    # A gain's own error: seeds move all cells alike, so that many cells do not average it away.
    error = mean_error(cells)
    what = f"{mean:.4f}, standard error {error:.4f}; on average {away.mean():+.4f}, "
    return no_worse(ERROR - mean, error, 0.0), what + f"at most {np.abs(away).max():.4f}"


def is_covered(cells: Rows) -> tuple[Verdict, str]:
    """Whether its intervals are honest."""
    inside = int((np.abs(off(cells)) <= half_width()).sum())
    return inside >= INSIDE, f"{inside} of {len(cells)} are within {half_width():.4f}"


def is_ordered(cells: Rows) -> tuple[Verdict, str]:
    """Ranks alone, which no curve is needed for."""
    gains = [cell["gain"] for cell in cells]
    rank, plain = (
        float(np.asarray(stats.spearmanr([cell[name] for cell in cells], gains))[0])
        for name in ("x", "predicted_plain")
    )
    return rank > 0.95, f"{rank:.3f}; by M / sigma {plain:.3f}"


def needs_norms(cells: Rows) -> tuple[Verdict, str]:
    """Against the same curve of M / sigma."""
    law, plain = (np.abs(off(cells, name)) for name in ("predicted", "predicted_plain"))
    lead = plain.mean() - 2 * law.mean()
    numbers = f"{law.mean():.4f} against {plain.mean():.4f} nats"
    return ahead(lead, math.sqrt(5) * mean_error(cells)), numbers


def best(cells: Rows, algorithm: str, name: str = "gain") -> Row:
    """The cell of an algorithm with the largest gain, or prediction."""
    return max((c for c in cells if c["algorithm"] == algorithm), key=lambda cell: cell[name])


def finds_the_group(cells: Rows) -> tuple[Verdict, str]:
    """ULS with the group that the law says, against the best other one."""
    chosen = best(cells, "uls", "predicted")
    others = [cell for cell in cells if cell["algorithm"] == "uls" and cell is not chosen]
    rival = best(others, "uls")
    lead = chosen["gain"] - rival["gain"]
    numbers = f"G = {chosen['group_size']}, ahead of G = {rival['group_size']} by {lead:.4f}"
    return no_worse(lead, math.sqrt(2) * error_of(cells)), numbers


def leads(cells: Rows) -> tuple[float, float]:
    """(By how much ULS is ahead of ELS, each with its best group; what was predicted)."""
    came, said = (
        best(cells, "uls", name)[name] - best(cells, "els", name)[name]
        for name in ("gain", "predicted")
    )
    return came, said


def lead_is_predicted(cells: Rows) -> tuple[Verdict, str]:
    """The difference of the algorithms."""
    came, said = leads(cells)
    numbers = f"{came:.4f}, predicted {said:.4f}"
    return alike(came - said, math.sqrt(2) * error_of(cells), ERROR), numbers


def lead_is_in_range(cells: Rows) -> tuple[Verdict, str]:
    """As expected before the norms of G = 64 were measured."""
    (came, _), (least, most) = leads(cells), LEADS
    middle, half = (least + most) / 2, (most - least) / 2
    return alike(came - middle, math.sqrt(2) * error_of(cells), half), f"{came:.4f}"


def lead_is_gone(cells: Rows) -> tuple[Verdict, str]:
    """Both algorithms tuned are alike."""
    came, said = leads(cells)
    numbers = f"{came:.4f}, predicted {said:.4f}"
    return alike(came, math.sqrt(2) * error_of(cells)), numbers


def at_the_rule(rows: Rows) -> tuple[str, Verdict, str]:
    """Without tuning, which is how the curve's own cells were trained: one seed."""
    own = [row for row in rows if not row["fresh"] and row["power"] == 0]
    away = np.array([row["gain_test"] - row["predicted"] for row in own])
    mean = float(np.abs(away).mean())
    numbers = f"{mean:.4f}; on average {away.mean():+.4f}, at most {np.abs(away).max():.4f}"
    error = mean_error(whole(rows)) * math.sqrt(SEEDS)
    what = f"with the rule's rate the law is off by less than {ERROR:g} nats on average"
    return what, no_worse(ERROR - mean, error, 0.0), numbers


def on(test: Callable[[Rows], tuple[Verdict, str]], data: str, epsilon: float) -> Callable:
    """The test, of some users at an epsilon."""
    return lambda cells: test([c for c in cells if (c["data"], c["epsilon"]) == (data, epsilon)])


OF_ALL: Mapping[str, Callable[[Rows], tuple[Verdict, str]]] = {
    f"the law is off by less than {ERROR:g} nats on average": is_near,
    f"{INSIDE} of {CELLS} gains are inside their 95% intervals": is_covered,
    "x orders the gains (Spearman above 0.95)": is_ordered,
    "without the norms of gradients it is off by more than twice as much": needs_norms,
}
OF_SETTINGS = {
    "no group of ULS gains more than the one that the law says": (finds_the_group, FEW, (4.0, 1.0)),
    f"ULS's lead is as predicted, within {ERROR:g} nats": (lead_is_predicted, FEW, (4.0, 1.0)),
    "ULS is ahead by 0.08 to 0.13 nats": (lead_is_in_range, FEW, (4.0, 1.0)),
    "tuned, ULS and ELS gain the same": (lead_is_gone, ALL, (4.0,)),
}


def plot(rows: Rows) -> Figure:
    """The law with its interval, and what came of the cells that it predicted."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    reach = np.geomspace(0.7, 100, 200)
    middle = np.array([gain(x) for x in reach])
    axis.plot(reach, middle, color="black", lw=1, label="the law, frozen before")
    axis.fill_between(reach, middle - half_width(), middle + half_width(), color="0.88")
    for (data, algorithm), own in by(whole(rows), lambda r: (r["data"], r["algorithm"])).items():
        name = f"{algorithm.upper()}, {'few users' if data == FEW else 'all users'}"
        marker = "o" if algorithm == "uls" else "s"
        axis.plot([c["x"] for c in own], [c["gain"] for c in own], marker, ms=5, label=name)
    axis.set(xscale="log", xlabel="x = M / (σ L(G))", ylabel="gain of held-out loss (nats)")
    axis.grid(alpha=0.3)
    common.legend_below(figure)
    return figure
