"""What regime.py tests of the paper's claims. These tests were committed before any of its runs.

A claim is judged when all of its cells have two seeds at least, and says until then how many of its
settings are there. Verdicts follow the rule of verdicts.py, with seeds in pairs.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments.fig05_uls_heatmap import best_is_small
from experiments.harness.rows import ERRORS, Row, Rows, StandardError, by, over_seeds
from experiments.harness.verdicts import Verdict, ahead, both, cell_error, no_worse

ALL, FEW = "scotus", "scotus, few users"
EPSILONS = (4.0, 1.0)
ELS_GROUPS = {ALL: (1, 8), FEW: (1,)}
"""Beside the median user's number of texts, and for all users twice that."""
ULS_GROUPS = (1, 4, 16)
"""Beside Estimate-and-Double's."""
SHARE = 0.1
"""Of the best gain that the median's group size may lose: what "works well" means in Figure 4."""
KEY = ("data", "algorithm", "epsilon", "group_size", "budget", "times")
SEEDS = 2
"""Of a cell, before it is judged."""
USERS_CELLS, USERS_SEEDS = 8, 6
"""Of Figure 8: two budgets, two numbers of users, two algorithms."""
Claim = tuple[str, Verdict, str]
BLOCK = ("data", "epsilon", "budget", "times")
"""Columns; cells that are alike in these have the same seeds."""


def that_count(rows: Sequence[Row]) -> Rows:
    """Rows but for those of cells that were begun again from another starting model."""
    return [row for row in rows if row["counts"]]


def whole_seeds(rows: Sequence[Row]) -> Rows:
    """Rows of seeds with which all cells that are compared with each other were trained: a seed
    moves all cells alike, and Figure 8 has seeds that the other cells have not."""
    blocks = by(rows, lambda row: tuple(row[name] for name in BLOCK))
    found = []
    for block in blocks.values():
        cells = {(row["algorithm"], row["group_size"]) for row in block}
        for own in by(block, lambda row: row["seed"]).values():
            if {(row["algorithm"], row["group_size"]) for row in own} == cells:
                found += own
    return found


def averaged(rows: Sequence[Row]) -> Rows:
    """A row for each cell, over its seeds, which may start from different models."""
    cells = by(that_count(rows), lambda row: tuple(row[name] for name in KEY)).values()
    return [
        {
            **own[-1],
            **over_seeds([row["loss"] for row in sorted(own, key=lambda row: row["seed"])]),
            "loss_before": float(np.mean([row["loss_before"] for row in own])),
        }
        for own in cells
    ]


def compared(found: Rows, data: str, epsilon: float, seeds: int = SEEDS) -> dict[str, Rows] | None:
    """Cells that differ in the group size alone, by algorithm; None before all are there."""
    own = [
        row for row in found if (row["data"], row["epsilon"], row["times"]) == (data, epsilon, 1)
    ]
    own = [row for row in own if row["budget"] == max(each["budget"] for each in own)]
    if not own:
        return None
    median, chosen = own[0]["median_examples"], own[0]["heuristic_group_size"]
    twice = {2 * median} if data == ALL else set()
    wanted = {"els": {*ELS_GROUPS[data], median} | twice, "uls": {*ULS_GROUPS, chosen}}
    there = {
        name: [row for row in own if row["algorithm"] == name and row["seeds"] >= seeds]
        for name in wanted
    }
    whole = all(
        {row["group_size"] for row in there[name]} >= groups for name, groups in wanted.items()
    )
    return there if whole else None


def check(rows: Sequence[Row]) -> list[Claim]:
    """All claims."""
    rows = that_count(rows)
    whole = whole_seeds(rows)
    found = averaged(whole)
    private = [row for row in rows if row["times"] == 1 and not math.isinf(row["epsilon"])]
    better = sum(row["loss"] < row["loss_before"] for row in private)
    planned = rows[0]["planned"]
    claims: list[Claim] = [
        ("ours: all trainings were run", len(rows) == planned, f"{len(rows)} of {planned}"),
        (
            "ours: every private training improves on the model it started from",
            better == len(private),
            f"{better} of {len(private)}; the other {len(rows) - len(private)} have no noise, or "
            "noise for more users than there are",
        ),
    ]
    for data in (ALL, FEW):
        settings = {each: compared(found, data, each) for each in EPSILONS}
        there = {each: own for each, own in settings.items() if own is not None}
        for what, (test, asked) in TESTS.items():
            if data in asked:
                held, numbers = None, f"{len(there)} of {len(EPSILONS)} settings are run"
                if len(there) == len(EPSILONS):
                    held, numbers = test(there)
                claims.append((f"{data}: {what}", held, numbers))
    return [*claims, *of_users(rows)]


def at(rows: Rows, group_size: int) -> Row:
    """The cell of a group size."""
    return next(row for row in rows if row["group_size"] == group_size)


def error_of(there: dict[float, dict[str, Rows]], cells: int = 2) -> StandardError:
    """Standard error of a difference between so many cells, by pairs of seeds."""
    rows = [row for own in there.values() for rows in own.values() for row in rows]
    return math.sqrt(cells) * cell_error(rows, BLOCK)


def median_works(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figure 4."""
    error, lost = error_of(there), {}
    for epsilon, own in there.items():
        median = at(own["els"], own["els"][0]["median_examples"])
        best = min(own["els"], key=lambda row: row["loss"])
        gain = median["loss_before"] - best["loss"]
        lost[epsilon] = median["loss"] - best["loss"], gain, best["group_size"]
    held = [no_worse(-excess, error, SHARE * gain) for excess, gain, _ in lost.values()]
    each = "; ".join(
        f"at epsilon {epsilon:g} {excess:.4f}, {excess / gain:.1%} of the gain, best G {group}"
        for epsilon, (excess, gain, group) in lost.items()
    )
    return both(*held), f"{each}; standard error {error:.4f}"


def groups_are_small(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figure 5."""
    error = error_of(there)
    found = [best_is_small(own["uls"], error, "expected_count") for own in there.values()]
    held = [verdict for verdict in found if verdict is not None]
    groups = "; ".join(
        f"at epsilon {epsilon:g} G = {min(own['uls'], key=lambda row: row['loss'])['group_size']}"
        for epsilon, own in there.items()
    )
    return both(*held), f"the best: {groups}; standard error {error:.4f}"


def larger_groups_pay(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Where the cohort cannot grow: more than one text of a user is better than one."""
    error = error_of(there)
    gains = {
        epsilon: at(own["uls"], 1)["loss"]
        - min(row["loss"] for row in own["uls"] if row["group_size"] > 1)
        for epsilon, own in there.items()
    }
    each = ", ".join(f"{gain:.4f} at epsilon {epsilon:g}" for epsilon, gain in gains.items())
    return ahead([*gains.values()], error), f"by {each}; standard error {error:.4f}"


def leads(there: dict[float, dict[str, Rows]], *, tuned: bool = False) -> dict[float, float]:
    """By how much ULS with Estimate-and-Double's group is ahead of ELS with the median's group, or
    with its best one."""
    found = {}
    for epsilon, own in there.items():
        uls = at(own["uls"], own["uls"][0]["heuristic_group_size"])["loss"]
        els = at(own["els"], own["els"][0]["median_examples"])["loss"]
        found[epsilon] = (min(row["loss"] for row in own["els"]) if tuned else els) - uls
    return found


def uls_is_as_good(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figure 6."""
    error, by_heuristics, tuned = error_of(there), leads(there), leads(there, tuned=True)
    each = "; ".join(
        f"ahead by {lead:.4f} at epsilon {epsilon:g}, of ELS with its best G {tuned[epsilon]:.4f}"
        for epsilon, lead in by_heuristics.items()
    )
    return no_worse([*by_heuristics.values()], error), f"{each}; standard error {error:.4f}"


def ahead_where_epsilon_is_small(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figures 6 and 7."""
    error, found = error_of(there, cells=4), leads(there)
    most, least = found[min(found)], found[max(found)]
    numbers = f"{most:.4f} against {least:.4f}, standard error {error:.4f}"
    return ahead(most - least, error), numbers


def heuristic_is_near(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figure 14: against the best of the other group sizes that were tried."""
    error, behind = error_of(there), {}
    for epsilon, own in there.items():
        chosen = at(own["uls"], own["uls"][0]["heuristic_group_size"])
        others = [row["loss"] for row in own["uls"] if row is not chosen]
        behind[epsilon] = chosen["loss"] - min(others), chosen["group_size"]
    each = "; ".join(
        f"at epsilon {epsilon:g} it says G = {group}, {excess:+.4f} from the best other"
        for epsilon, (excess, group) in behind.items()
    )
    held = no_worse([-excess for excess, _ in behind.values()], error)
    return held, f"{each}; standard error {error:.4f}"


def heuristic_beats_chance(there: dict[float, dict[str, Rows]]) -> tuple[Verdict, str]:
    """Figure 14: against the mean of all group sizes that were tried."""
    error, gains = error_of(there) / math.sqrt(len(there)), []
    for own in there.values():
        chosen = at(own["uls"], own["uls"][0]["heuristic_group_size"])["loss"]
        gains.append(float(np.mean([row["loss"] for row in own["uls"]])) - chosen)
    gain = float(np.mean(gains))
    return ahead(gain, error), f"by {gain:.4f} on average, standard error {error:.4f}"


BOTH = (ALL, FEW)
TESTS = {
    "with the median user's group size ELS loses at most 10% of the gain (Figure 4)": (
        median_works,
        BOTH,
    ),
    "the best G_ULS is ten times below its cohort (Figure 5)": (groups_are_small, (ALL,)),
    "ULS with G > 1 is better than with G = 1": (larger_groups_pay, (FEW,)),
    "ULS is at least as good as ELS, both by the heuristics (Figure 6)": (uls_is_as_good, BOTH),
    "ULS is ahead the most where epsilon is small (Figure 6)": (ahead_where_epsilon_is_small, BOTH),
    "Estimate-and-Double is as good as the best G_ULS (Figure 14)": (heuristic_is_near, BOTH),
    "Estimate-and-Double is better than chance (Figure 14)": (heuristic_beats_chance, BOTH),
}
"""By what is claimed: its test, and of which users it is claimed."""


def of_users(rows: Rows) -> list[Claim]:
    """Figure 8, with six seeds: gains from compute, and from more users in the accounting."""
    found = averaged(rows)
    own = [row for row in found if row["data"] == ALL and row["epsilon"] == EPSILONS[0]]
    own = [
        row for row in own if row["seeds"] >= USERS_SEEDS and row["group_size"] == heuristic_of(row)
    ]
    loss = {(row["times"], row["budget"], row["algorithm"]): row["loss"] for row in own}
    times, budgets = (sorted({row[name] for row in own}) for name in ("times", "budget"))
    names = {
        "ULS gains more from a larger budget than ELS (Figure 8)": ("uls", "els"),
        "ELS gains more from more users than ULS (Figure 8)": ("els", "uls"),
    }
    if len(loss) < USERS_CELLS:
        missing = None, f"{len(loss)} of {USERS_CELLS} cells have {USERS_SEEDS} seeds"
        return [(f"{ALL}: {name}", *missing) for name in names]
    compute = {f"{t} times the users": ((t, budgets[0]), (t, budgets[-1])) for t in times}
    users = {f"B = {b}": ((times[0], b), (times[-1], b)) for b in budgets}
    claims, paired = [], []
    error, seeds = 2 * cell_error(own, BLOCK), losses_by_seed(rows, own)
    for (name, who), ends in zip(names.items(), (compute, users), strict=True):
        more = [gains_more(loss, *each, *who) for each in ends.values()]
        numbers = ", ".join(f"by {x:.4f} with {at}" for at, x in zip(ends, more, strict=True))
        numbers += f"; standard error {error:.5f}"
        claims.append((f"{ALL}: {name}", ahead(more, error), numbers))
        for where, each in ends.items():
            pairs = [gains_more(losses, *each, *who) for losses in seeds]
            spread = float(np.std(pairs, ddof=1)) / math.sqrt(len(pairs))
            of_pairs = StandardError(spread, len(pairs) - 1).times(ERRORS)
            paired.append(f"{who[0].upper()} by {np.mean(pairs):.4f} with {where} ({of_pairs:.4f})")
    what = f"{ALL}, added after the runs: who gains more (Figure 8), by pairs of seeds"
    return [*claims, (what, None, f"{', '.join(paired)}; in brackets what the seeds explain")]


def gains_more(
    loss: dict[tuple, float], first: tuple, last: tuple, winner: str, loser: str
) -> float:
    """By how much more the loss of one algorithm falls from one (times, budget) to another."""
    return (loss[*first, winner] - loss[*last, winner]) - (loss[*first, loser] - loss[*last, loser])


def losses_by_seed(rows: Rows, cells: Rows) -> list[dict[tuple, float]]:
    """The losses of each seed that all the cells have, by (times, budget, algorithm)."""
    wanted = {tuple(row[name] for name in KEY) for row in cells}
    rows = [row for row in rows if tuple(row[name] for name in KEY) in wanted]
    found = (
        {(row["times"], row["budget"], row["algorithm"]): row["loss"] for row in own}
        for own in by(rows, lambda row: row["seed"]).values()
    )
    return [losses for losses in found if len(losses) == len(wanted)]


def heuristic_of(row: Row) -> int:
    """The group size that the heuristic of a row's algorithm says."""
    return row["median_examples" if row["algorithm"] == "els" else "heuristic_group_size"]
