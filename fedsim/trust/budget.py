"""The privacy budget of users: the cost of all runs on their texts, and their limits."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most
from fedsim.budget import Limit, RunCost, books, open_locked, open_read_only, union
from fedsim.config import default_delta, to_json
from fedsim.plan import in_words
from fedsim.run import aligned


def budget(
    place: Path,
    ids: Sequence[str] | None,
    *,
    delta: float | None = None,
    limit_epsilon: float | None = None,
) -> dict[str, Any]:
    """The cost of all runs on the texts of some users, for the user who pays most.

    Args:
      place: directory of the ledger of the data; it is made only to set a limit.
      ids: of the users; None for all users in the ledger.
      delta: of the epsilons; None for the default of runs.
      limit_epsilon: a limit to set for these users.

    Returns: The JSON object of `fedsim budget`.

    Raises:
      ConfigError: the ledger cannot be written.
      LedgerError, FileDamaged: the ledger was changed.
    """
    with (open_read_only if limit_epsilon is None else open_locked)(place) as ledger:
        accounts = books(ledger, ids)
        users = union(
            [ledger.users_of(each.entry.users) for each in accounts.charges]
            if ids is None
            else [ledger.users(ids)]
        )
        delta = default_delta(len(users)) if delta is None else delta
        if limit_epsilon is not None:
            limited = None if ids is None else ledger.save_users(users)
            ledger.limit(Limit(limit_epsilon, delta, limited))
            accounts = books(ledger, ids)
        rows = [
            _row(each, int(np.isin(users, ledger.users_of(each.entry.users)).sum()), delta)
            for each in accounts.charges
        ]
        alike = "" if ids is None else ledger.lookalike_warning(ids)
    spent = accounts.total(delta)
    return {
        "ledger": str(place),
        "num_users": len(users),
        "delta": delta,
        "epsilon": to_json(spent.fixed),
        "epsilon_adaptive": to_json(spent.adaptive),
        "limits": [
            {
                "epsilon": each.epsilon,
                "delta": each.delta,
                "spent": to_json(accounts.under(each).total(each.delta).adaptive),
            }
            for each in accounts.limits
        ],
        "runs": rows,
        "alike": alike,
    }


def _row(charge: RunCost, num_users: int, delta: float) -> dict[str, Any]:
    entry, released = charge.entry, charge.released
    alone = math.inf if released is None else accounting.epsilon(charge.reserved or [], delta)
    return {
        "run": Path(entry.place).name or entry.kind,
        "place": entry.place,
        "kind": entry.kind,
        "state": entry.outcome or "open",
        "began": entry.began,
        "users": num_users,
        "releases": None if released is None else sum(count for _, count in released),
        "epsilon": to_json(alone),
        "guarantee": released is not None and not entry.label,
        "why_not": "without noise" if released is None else entry.label,
    }


def table(result: dict[str, Any]) -> str:
    """The runs as a text table; a star marks what is no guarantee."""
    head = "run", "kind", "state", "began", "users", "releases", "epsilon alone"
    rows: list[tuple[str, ...]] = [head]
    for each in result["runs"]:
        releases = "-" if each["releases"] is None else f"{each['releases']:,}"
        epsilon = _shown(each["epsilon"]) + ("" if each["guarantee"] else "*")
        about = (each[name] for name in ("run", "kind", "state", "began"))
        rows.append((*about, f"{each['users']:,}", releases, epsilon))
    return "\n".join(aligned(rows))


def sentences(result: dict[str, Any]) -> list[str]:
    """Sentences on the cost and on the limits."""
    runs, delta = result["runs"], at_most(result["delta"], ".2e")
    epsilon, adaptive = _shown(result["epsilon"]), _shown(result["epsilon_adaptive"])
    users = f"these {result['num_users']:,} users (each row: how many of them it cost)"
    total = f"Over all runs ({len(runs)}) on texts of {users}, the "
    bad = [each for each in runs if not each["guarantee"] and each["releases"] != 0]
    if epsilon == "inf" and bad:
        names = ", ".join(f"{each['run']} ({in_words(each['why_not'])})" for each in bad)
        lines = [
            f"{total}cost is unlimited, because {len(bad)} of them had no guarantee: {names}. This "
            "is permanent: the released model may reveal these users' texts. For later trials use "
            "a ledger of their own (budget_ledger), and for a release other users."
        ]
    else:
        lines = [
            f"{total}total cost of each user is at most epsilon = {epsilon} at delta = {delta}.",
            "If you looked at earlier results to decide on later runs (most people do), count "
            f"{adaptive}, for a limit that was fixed before the first run.",
        ]
    for each in result["limits"]:
        limit = f"{each['epsilon']:g} at delta = {at_most(each['delta'], '.2e')}"
        lines.append(f"Of the limit of {limit}, {_shown(each['spent'])} is spent.")
    lines += [f"Warning: {result['alike']}."] if result["alike"] else []
    if runs:
        lines.append(
            "Not counted: losses of held-out users that were computed without noise, as by default "
            "(eval_epsilon adds noise). No ledger has them."
        )
    return [*lines, "* no guarantee"] if bad else lines


def _shown(epsilon: float | str) -> str:
    return "inf" if epsilon == "inf" else at_most(float(epsilon), ".4g")
