"""What regime.py tests of the paper's claims. These tests were committed before any of its runs.

A claim is judged when all of its cells have two seeds at least, and says until then how many of its
settings are there. Differences count beyond three standard errors of the seeds, as in all figures.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments.rows import ERRORS, Row, Rows, by, margin, over_seeds

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
Claim = tuple[str, bool | None, str]


def that_count(rows: Sequence[Row]) -> Rows:
    """Rows but for those of cells that were begun again from another starting model."""
    return [row for row in rows if row["counts"]]


def whole_seeds(rows: Sequence[Row]) -> Rows:
    """Rows of seeds with which all cells that are compared with each other were trained: a seed
    moves all cells alike, and Figure 8 has seeds that the other cells have not."""
    blocks = by(rows, lambda row: tuple(row[n] for n in ("data", "epsilon", "budget", "times")))
    found = []
    for block in blocks.values():
        cells = {(row["algorithm"], row["group_size"]) for row in block}
        for own in by(block, lambda row: row["seed"]).values():
            if {(row["algorithm"], row["group_size"]) for row in own} == cells:
                found += own
    return found


def averaged(rows: Sequence[Row]) -> Rows:
    """A row for each cell, over its seeds, which may start from different models."""
    return [
        {
            **own[-1],
            **over_seeds([row["loss"] for row in own]),
            "loss_before": float(np.mean([row["loss_before"] for row in own])),
        }
        for own in by(that_count(rows), lambda row: tuple(row[name] for name in KEY)).values()
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
    better = sum(row["loss"] < row["loss_before"] for row in rows)
    planned = rows[0]["planned"]
    claims: list[Claim] = [
        ("ours: all trainings were run", len(rows) == planned, f"{len(rows)} of {planned}"),
        (
            "ours: every training improves on the model it started from",
            better == len(rows),
            f"{better} of {len(rows)}",
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
        if len(there) == len(EPSILONS):
            what = f"{data}, added after the runs: what the median loses, by pairs of seeds"
            claims.append((what, None, paired_by_seed(whole, data, there)))
    return [*claims, *of_users(rows)]


def paired_by_seed(rows: Rows, data: str, there: dict[float, dict[str, Rows]]) -> str:
    """Figure 4 without what moves all cells of a seed alike: its draws, its noise, its start.

    The variance is what is left of losses without the means of their cells and of their seeds,
    pooled over epsilon. Args: rows: of seeds that all cells have.
    """
    squares, freedom, said = 0.0, 0, []
    for epsilon, own in there.items():
        cells = {(name, row["group_size"]) for name, each in own.items() for row in each}
        where = {"data": data, "epsilon": epsilon, "times": 1, "budget": own["els"][0]["budget"]}
        kept = [row for row in rows if where.items() <= row.items()]
        loss = {(row["algorithm"], row["group_size"], row["seed"]): row["loss"] for row in kept}
        seeds = sorted({seed for *_, seed in loss})
        table = np.array([[loss[(*cell, seed)] for seed in seeds] for cell in sorted(cells)])
        left = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
        squares += float((left**2).sum())
        freedom += (len(cells) - 1) * (len(seeds) - 1)
        median = at(own["els"], own["els"][0]["median_examples"])
        best = min(row["loss"] for row in own["els"])
        lost, gain = median["loss"] - best, median["loss_before"] - best
        said.append((epsilon, lost, lost / gain, len(seeds)))
    error = ERRORS * math.sqrt(2 * squares / freedom / min(seeds for *_, seeds in said))
    each = ", ".join(f"{lost:.4f} ({share:.1%}) at epsilon {e:g}" for e, lost, share, _ in said)
    return f"{each} of the gain; seeds explain {error:.4f}"


def at(rows: Rows, group_size: int) -> Row:
    """The cell of a group size."""
    return next(row for row in rows if row["group_size"] == group_size)


def noise_of(there: dict[float, dict[str, Rows]], cells: int = 2) -> float:
    """What the seeds explain of a difference."""
    return margin([row for own in there.values() for rows in own.values() for row in rows], cells)


def median_works(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figure 4, by its first rule."""
    noise, lost = noise_of(there), {}
    for epsilon, own in there.items():
        median = at(own["els"], own["els"][0]["median_examples"])
        best = min(own["els"], key=lambda row: row["loss"])
        most = max(SHARE * (median["loss_before"] - best["loss"]), noise)
        lost[epsilon] = median["loss"] - best["loss"], most, best["group_size"]
    good = sum(excess <= most for excess, most, _ in lost.values())
    each = "; ".join(
        f"at epsilon {epsilon:g} {excess:.4f} of {most:.4f} that may be lost, the best G is {group}"
        for epsilon, (excess, most, group) in lost.items()
    )
    return good == len(lost), each


def groups_are_small(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figure 5: of the G that are as good as the best, one is a tenth of its cohort at most."""
    noise, said, small = noise_of(there), [], 0
    for epsilon, own in there.items():
        best = min(row["loss"] for row in own["uls"])
        good = [row for row in own["uls"] if row["loss"] <= best + noise]
        small += any(10 * row["group_size"] <= row["expected_count"] for row in good)
        groups = ", ".join(str(g) for g in sorted(row["group_size"] for row in good))
        said.append(f"at epsilon {epsilon:g} G = {groups}")
    return small == len(there), f"as good as the best: {'; '.join(said)}; seeds explain {noise:.4f}"


def larger_groups_pay(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Where the cohort cannot grow: more than one text of a user is better than one."""
    noise = noise_of(there)
    gains = {
        epsilon: at(own["uls"], 1)["loss"]
        - min(row["loss"] for row in own["uls"] if row["group_size"] > 1)
        for epsilon, own in there.items()
    }
    each = ", ".join(f"{gain:.4f} at epsilon {epsilon:g}" for epsilon, gain in gains.items())
    return min(gains.values()) > noise, f"by {each}; seeds explain {noise:.4f}"


def leads(there: dict[float, dict[str, Rows]], *, tuned: bool = False) -> dict[float, float]:
    """By how much ULS with Estimate-and-Double's group is ahead of ELS with the median's group, or
    with its best one."""
    found = {}
    for epsilon, own in there.items():
        uls = at(own["uls"], own["uls"][0]["heuristic_group_size"])["loss"]
        els = at(own["els"], own["els"][0]["median_examples"])["loss"]
        found[epsilon] = (min(row["loss"] for row in own["els"]) if tuned else els) - uls
    return found


def uls_is_as_good(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figure 6."""
    noise, ahead, tuned = noise_of(there), leads(there), leads(there, tuned=True)
    each = "; ".join(
        f"ahead by {lead:.4f} at epsilon {epsilon:g}, of ELS with its best G {tuned[epsilon]:.4f}"
        for epsilon, lead in ahead.items()
    )
    return min(ahead.values()) > -noise, f"{each}; seeds explain {noise:.4f}"


def ahead_where_epsilon_is_small(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figures 6 and 7."""
    noise, ahead = noise_of(there, cells=4), leads(there)
    most, least = ahead[min(ahead)], ahead[max(ahead)]
    return most - least > noise, f"{most:.4f} against {least:.4f}, seeds explain {noise:.4f}"


def heuristic_is_near(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figure 14: against the best group size that was tried."""
    noise, behind = noise_of(there), {}
    for epsilon, own in there.items():
        chosen = at(own["uls"], own["uls"][0]["heuristic_group_size"])
        behind[epsilon] = chosen["loss"] - min(row["loss"] for row in own["uls"]), chosen
    each = "; ".join(
        f"at epsilon {epsilon:g} it says G = {row['group_size']}, {excess:.4f} above the best"
        for epsilon, (excess, row) in behind.items()
    )
    most = max(excess for excess, _ in behind.values())
    return most <= noise, f"{each}; seeds explain {noise:.4f}"


def heuristic_beats_chance(there: dict[float, dict[str, Rows]]) -> tuple[bool, str]:
    """Figure 14: against the mean of all group sizes that were tried."""
    noise, gains = noise_of(there) / math.sqrt(len(there)), []
    for own in there.values():
        chosen = at(own["uls"], own["uls"][0]["heuristic_group_size"])["loss"]
        gains.append(float(np.mean([row["loss"] for row in own["uls"]])) - chosen)
    gain = float(np.mean(gains))
    return gain > noise, f"by {gain:.4f} on average, seeds explain {noise:.4f}"


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
    noise, seeds = margin(own, cells=4), losses_by_seed(rows, own)
    for (name, who), ends in zip(names.items(), (compute, users), strict=True):
        ahead = [gains_more(loss, *each, *who) for each in ends.values()]
        error = noise / math.sqrt(len(ends))
        numbers = f"by {np.mean(ahead):.4f} on average, seeds explain {error:.4f}"
        holds = min(ahead) > -noise and float(np.mean(ahead)) > error
        claims.append((f"{ALL}: {name}", holds, numbers))
        for where, each in ends.items():
            pairs = [gains_more(losses, *each, *who) for losses in seeds]
            error = ERRORS * float(np.std(pairs, ddof=1)) / math.sqrt(len(pairs))
            paired.append(f"{who[0].upper()} by {np.mean(pairs):.4f} with {where} ({error:.4f})")
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
