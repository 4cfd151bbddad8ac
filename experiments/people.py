"""What k people together are promised: the accountant's epsilon against group privacy's.

Beyond the paper. ULS and ELS at epsilon = 4 for one user, in the paper's settings of Stack Overflow
(T = 10,000, B = 1,024, G = 128) and CC-News (T = 2,000, B = 256, G = 16, ten times its users), and
with the size of scotus. Epsilon of k users together at the same delta, for k up to 1,000, by the
accountant (docs/theory/people.md), and by group privacy from what is known of one user: the best
epsilon of the accountant's curve (PLD), or Renyi divergences (RDP). The first ends soon: the deltas
that it needs are smaller than the curve resolves. And k epsilon, at the delta that it holds for.

    python -m experiments.people --scale small     (18 minutes, busy machine; smoke: 20 s)
"""

import dataclasses
import math
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import special, stats

from experiments.harness import common
from experiments.harness.rows import Row, Rows
from fedsim import accounting
from fedsim.accounting import StepEvent, composition, log_group_growth

NAME = "people"
ORDERS: np.ndarray = np.unique(np.geomspace(1.1, 512, 60).round(1))


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, with epsilon for one user."""

    data: str
    users: int
    """N, as it is accounted for."""
    delta: float
    num_steps: int
    batch_size: int
    """B of ELS, and M of ULS with groups of one."""
    group_size: int
    """G of ELS."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    cases: tuple[Case, ...] = (
        Case("Stack Overflow", 342_477, 1.13e-9, 10_000, 1024, 128),
        Case("CC-News", 87_590, 2.92e-8, 2_000, 256, 16),
        Case("scotus", 9_324, 1e-6, 2_000, 256, 16),
    )
    people: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    epsilon: float = 4.0


SETTINGS = {
    "smoke": Settings((Case("made up", 1_000, 1e-5, 100, 16, 2),), (1, 2, 10)),
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
    most = case.group_size if algorithm == "ELS" else 1
    prob = case.batch_size / (most * case.users)
    noise = accounting.calibrate_noise(
        lambda sigma: StepEvent(sigma, prob, most),
        epsilon=settings.epsilon,
        delta=case.delta,
        num_steps=case.num_steps,
        before=[],
    )
    event = StepEvent(noise, prob, most)
    phases: accounting.Events = [(event, case.num_steps)]
    one, rows = accounting.epsilon(phases, case.delta), []
    for people in settings.people:

        def exact(people: int = people) -> float:
            return accounting.epsilon(accounting.for_people(phases, people), case.delta)

        def by_curve(people: int = people) -> float:
            return accounting.group_epsilon(phases, case.delta, people)

        def by_renyi(people: int = people) -> float:
            divergences = case.num_steps * renyi(event, ORDERS)
            return group_renyi(divergences, case.delta, people)

        (epsilon, seconds), (pld, pld_s), (rdp, rdp_s) = map(timed, (exact, by_curve, by_renyi))
        growth = float(log_group_growth(np.array(one), people))
        rows.append(
            {
                "data": case.data,
                "algorithm": algorithm,
                "people": people,
                "noise_multiplier": noise,
                "epsilon": epsilon,
                "group_pld": pld,
                "group_rdp": rdp,
                "k_epsilon": people * one,
                "delta_of_k_epsilon": min(1.0, case.delta * math.exp(min(growth, 700.0))),
                "seconds": seconds,
                "seconds_pld": pld_s,
                "seconds_rdp": rdp_s,
            }
        )
    return rows


def timed(compute: Callable[[], float]) -> tuple[float, float]:
    """(the answer, or inf where the loss is too large to be added up; seconds)."""
    began = time.perf_counter()
    try:
        answer = compute()
    except composition.GridTooLargeError:
        answer = math.inf
    return answer, time.perf_counter() - began


def renyi(event: StepEvent, orders: np.ndarray) -> np.ndarray:
    """Renyi divergence of a step of one user at each order > 1, the larger of both directions.

    By the trapezoidal rule: the integrand of the mixture against the Gaussian is a sum of functions
    that are nowhere narrower than the noise, on [0, order times contributions].
    """
    most, noise = event.max_contributions, event.noise_multiplier
    counts = np.arange(most + 1)
    weights = stats.binom.logpmf(counts, most, event.sampling_prob)

    def log_moment(order: float, x: np.ndarray, exchanged: bool) -> float:
        terms = weights + stats.norm.logpdf(x[:, None], counts, noise)
        mixture = np.asarray(special.logsumexp(terms, axis=1))
        pair = mixture, stats.norm.logpdf(x, 0, noise)
        upper, lower = pair[::-1] if exchanged else pair
        return float(special.logsumexp(order * upper - (order - 1) * lower) + np.log(x[1] - x[0]))

    near = np.arange(-20 * noise, 20 * noise, noise / 32)
    found = []
    for order in orders.tolist():
        wide = np.arange(-12 * noise, order * most + 12 * noise, noise / 2)
        larger = max(log_moment(order, wide, False), log_moment(order, near, True))
        found.append(larger / (order - 1))
    return np.array(found)


def group_renyi(divergences: np.ndarray, delta: float, people: int) -> float:
    """Group privacy of so many users, of the best epsilon that Renyi divergences give for one.

    Source: Canonne, Kamath and Steinke 2020, Proposition 12; Vadhan 2017, Lemma 2.2.

    Args:
      divergences: of all steps, at each of ORDERS.
    """
    levels = np.geomspace(1e-3, 1e9, 4000)
    constants = (ORDERS - 1) * (divergences + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    logs = (constants[:, None] - np.multiply.outer(ORDERS - 1, levels)).min(axis=0)
    holds = np.flatnonzero(logs + log_group_growth(levels, people) <= math.log(delta))
    return people * float(levels[holds[0]]) if holds.size else math.inf


def check(rows: Rows) -> common.Claims:
    """What holds in every case."""
    several = [row for row in rows if row["people"] > 1]
    claims = []
    for field in ("group_pld", "group_rdp"):
        known = [row for row in several if math.isfinite(row["epsilon"] + row[field])]
        below = [row["epsilon"] / row[field] for row in known]
        claims.append(
            (
                f"the accountant is never above group privacy by {field[-3:].upper()}",
                all(share <= 1 + 1e-3 for share in below),
                f"{min(below):.2g} to {max(below):.2f} of it, where both are known",
            )
        )
    many = [row["delta_of_k_epsilon"] for row in several if row["people"] >= 10]
    claims.append(
        (
            "for ten users or more, k epsilon promises nothing: its delta is 1",
            all(delta == 1 for delta in many),
            f"the least is {min(many):g}",
        )
    )
    return claims


def plot(rows: Rows) -> Figure:
    """Epsilon by k, a panel for each data set and algorithm."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = plt.subplots(
        2, len(names), figsize=(1.5 + 3.2 * len(names), 6), layout="constrained", squeeze=False
    )
    for across, algorithm in zip(axes, common.COLOURS, strict=True):
        for axis, name in zip(across, names, strict=True):
            own = [r for r in rows if r["data"] == name and r["algorithm"] == algorithm]
            people = [row["people"] for row in own]
            for value, look, colour, label in (
                ("epsilon", "o-", "tab:blue", "accountant"),
                ("group_pld", "x--", "tab:orange", "group privacy, PLD"),
                ("group_rdp", "+:", "tab:green", "group privacy, RDP"),
                ("k_epsilon", "-", "tab:gray", "k epsilon, at a larger delta"),
            ):
                known = [row[value] if row[value] < 1e6 else math.nan for row in own]
                axis.plot(people, known, look, color=colour, label=label, markersize=4)
            axis.set(xscale="log", yscale="log", title=f"{name}, {algorithm}")
            axis.grid(alpha=0.3)
        across[0].set_ylabel("epsilon at the delta of one user")
    for axis in axes[-1]:
        axis.set_xlabel("k users together")
    common.legend_below(figure)
    return figure


if __name__ == "__main__":
    common.main(globals())
