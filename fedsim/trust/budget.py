"""The privacy budget of users: the cost of all runs on their texts, and what limits leave."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import StepEvent, at_least, at_most
from fedsim.budget import (
    Account,
    BudgetLedger,
    Entry,
    Limit,
    RunCost,
    books,
    open_locked,
    open_read_only,
    union,
)
from fedsim.config import default_delta, to_json
from fedsim.plan import in_words
from fedsim.run import aligned

MAX_NAMED = 5
HEAD = "run", "kind", "state", "began", "users", "releases", "epsilon alone"


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

    Returns:
      The JSON object of `fedsim budget`.

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
        return {"ledger": str(place)} | _statement(ledger, accounts, users, delta)


def _statement(
    ledger: BudgetLedger, accounts: Account, users: np.ndarray, delta: float
) -> dict[str, Any]:
    spent, charges = accounts.total(delta), accounts.charges
    sizes = [int(np.isin(users, ledger.users_of(each.entry.users)).sum()) for each in charges]
    return {
        "num_users": len(users),
        "delta": delta,
        "epsilon": to_json(spent.fixed),
        "epsilon_adaptive": to_json(spent.adaptive),
        "limits": [
            {
                "epsilon": each.epsilon,
                "delta": each.delta,
                "left": to_json(left(accounts, each)),
                "spent": to_json(accounts.under(each).total(each.delta).adaptive),
            }
            for each in accounts.limits
        ],
        "runs": [_row(each, size, delta) for each, size in zip(charges, sizes, strict=True)],
    }


def left(accounts: Account, limit: Limit) -> float:
    """Epsilon, at the limit's delta, of the largest Gaussian mechanism that still fits."""
    limited = dataclasses.replace(accounts.under(limit), limits=[limit])

    def charge(mu: float) -> RunCost:
        number = max((each.entry.number for each in accounts.charges), default=0) + 1
        planned: list[tuple[accounting.Event, int]] = [(StepEvent(1 / mu, 1.0), 1)]
        entry = Entry(number, "", "", "", "", "", planned, (0.0, 0.0))
        return RunCost(entry, planned)

    if limited.total(limit.delta).adaptive >= limit.epsilon:
        return 0.0
    low, high = 1e-3, 2 * limit.epsilon + 1
    if limited.broken_by(charge(low)):
        return 0.0
    while high / low > 1 + 1e-3:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if limited.broken_by(charge(middle)) else (middle, high)
    return accounting.gaussian_epsilon(low, limit.delta)


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
    rows: list[tuple[str, ...]] = [HEAD]
    for each in result["runs"]:
        releases = "-" if each["releases"] is None else f"{each['releases']:,}"
        epsilon = _shown(each["epsilon"]) + ("" if each["guarantee"] else "*")
        about = (each[name] for name in ("run", "kind", "state", "began"))
        rows.append((*about, f"{each['users']:,}", releases, epsilon))
    return "\n".join(aligned(rows))


SENTENCES = {
    "unlimited": "{total}the cost is unlimited, because {count} of them had no guarantee: {names}. "
    "This is permanent: the released model may reveal these users' texts. For later trials use a "
    "ledger of their own (budget_ledger), and for a release other users.",
    "cost": "{total}the total cost of each user is at most epsilon = {epsilon} at delta = {delta}.",
    "adaptive": "If you looked at earlier results to decide on later runs (most people do), count "
    "{adaptive}, for a limit that was fixed before the first run.",
    "exceeded": "The limit of {limit} is exceeded: {spent} is spent. No further run is allowed.",
    "left": "The limit is {limit}: epsilon = {left} is left for one release with Gaussian noise. A "
    "training, whose losses are not quite Gaussian, may fit only with a little less.",
    "alone": "'epsilon alone' is at delta = {delta} for every run, and differs from the epsilon "
    "of a run that was planned at another delta.",
    "not counted": "Not counted: losses of held-out users that were computed without noise, as by "
    "default (eval_epsilon adds noise). No ledger has them.",
}


def sentences(result: dict[str, Any]) -> list[str]:
    """Sentences on the cost and on what the limits leave."""
    lines, runs = [], result["runs"]

    def say(name: str, **values: Any) -> None:
        lines.append(SENTENCES[name].format(**values))

    delta, epsilon = at_most(result["delta"], ".2e"), _shown(result["epsilon"])
    plural = "" if len(runs) == 1 else "s"
    total = f"Over {len(runs)} run{plural} on texts of these {result['num_users']:,} users, "
    bad = [each for each in runs if not each["guarantee"] and each["releases"] != 0]
    if epsilon == "inf" and bad:
        names = [f"{each['run']} ({in_words(each['why_not'])})" for each in bad[:MAX_NAMED]]
        names += ["..."] * (len(bad) > MAX_NAMED)
        say("unlimited", total=total, count=len(bad), names=", ".join(names))
    else:
        say("cost", total=total, epsilon=epsilon, delta=delta)
        if len(runs) > 1:
            say("adaptive", adaptive=_shown(result["epsilon_adaptive"]))
    for each in result["limits"]:
        limit = f"{each['epsilon']:g} at delta = {at_most(each['delta'], '.2e')}"
        if float(each["spent"]) > each["epsilon"]:
            say("exceeded", limit=limit, spent=_shown(each["spent"]))
        else:
            say("left", limit=limit, left=at_least(float(each["left"]), ".4g"))
    if runs:
        say("alone", delta=delta)
        say("not counted")
    return [*lines, "* no guarantee"] if bad else lines


def _shown(epsilon: float | str) -> str:
    return "inf" if epsilon == "inf" else at_most(float(epsilon), ".4g")
