"""The privacy budget of users: the cost of all runs on their texts, and what limits leave.

The numbers for several people together hold if no run was chosen by looking at the releases of
others; docs/theory/people.md.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import SelectionEvent, StepEvent, at_least, at_most
from fedsim.budget import (
    Account,
    BudgetLedger,
    Entry,
    Limit,
    RunCost,
    Total,
    books,
    open_locked,
    open_read_only,
    union,
)
from fedsim.config import INDEPENDENT, default_delta, to_json
from fedsim.errors import ConfigError
from fedsim.plan import in_words
from fedsim.run import aligned, ledger as run_ledger
from fedsim.trust.claim import FIXED_USERS, PEOPLE, SLACK_SHARE

MAX_NAMED = 5
HEAD = "run", "kind", "state", "began", "users", "releases", "epsilon alone"
THEOREM, GROUP = "theorem", "group privacy"


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
        result = {"ledger": str(place)} | _found(ledger, accounts, users, delta)
        result["alike"] = "" if ids is None else ledger.lookalike_warning(ids)
    return result


def _found(
    ledger: BudgetLedger, accounts: Account, users: np.ndarray, delta: float
) -> dict[str, Any]:
    spent = accounts.total(delta, sums=True)
    sizes = [
        int(np.isin(users, ledger.users_of(each.entry.users)).sum()) for each in accounts.charges
    ]
    return {
        "num_users": len(users),
        "delta": delta,
        "epsilon": to_json(spent.fixed),
        "epsilon_adaptive": to_json(spent.adaptive),
        "sum_of_epsilons": to_json(spent.added_up),
        "limits": [
            {
                "epsilon": each.epsilon,
                "delta": each.delta,
                "left": to_json(left(accounts, each)),
                "spent": to_json(accounts.under(each).total(each.delta).adaptive),
            }
            for each in accounts.limits
        ],
        "runs": [
            _row(each, size, delta) for each, size in zip(accounts.charges, sizes, strict=True)
        ],
        "several": _several(accounts.charges, sizes, len(users), spent),
    }


def _several(
    charges: Sequence[RunCost], sizes: Sequence[int], num_users: int, spent: Total
) -> list[dict[str, Any]]:
    """Epsilon of k users together, whoever they are, over all runs; empty if one has none."""
    if not charges or math.isinf(spent.fixed):
        return []
    found = [(1, spent.fixed, THEOREM)]
    for people in (k for k in PEOPLE if k <= num_users):
        counts = [min(people, size) for size in sizes]  # of k users, a run reads no more
        found.append((people, *composed(charges, counts, people, spent.delta)))
    return [{"people": k, "epsilon": to_json(epsilon), "how": how} for k, epsilon, how in found]


def why_by_group(charge: RunCost) -> str:
    """Reason why only group privacy is known for what a run releases; empty if the theorem is.

    An event does not say whether the noise of cyclic sampling is correlated; the run's ledger does.
    """
    events = [event for event, _ in charge.reserved or []]
    steps = [event for event in events if isinstance(event, StepEvent)]
    if any(event.allocated for event in steps):
        return "random allocation"
    if any(isinstance(event, SelectionEvent) for event in events):
        return "a private selection"
    if all(event.cycle == 1 for event in steps):
        return ""
    head = run_ledger.head_of(Path(charge.entry.place), charge.entry.run)
    if not head:
        return "cyclic sampling, perhaps with correlated noise, in a directory that is gone"
    noise = head["plan"].get("noise", INDEPENDENT)  # earlier versions wrote the kind alone
    independent = (noise["kind"] if isinstance(noise, dict) else noise) == INDEPENDENT
    return "" if independent else "correlated noise"


def composed(
    charges: Sequence[RunCost], counts: Sequence[int], people: int, delta: float
) -> tuple[float, str]:
    """Epsilon of runs with a guarantee for several people together; inf if none is known.

    Args:
      counts: the largest number of the people whom each run reads.
      people: their number.
    Returns:
      Epsilon, and THEOREM or GROUP.
    """
    pairs = [pair for pair in zip(charges, counts, strict=True) if pair[0].released != []]
    slacks, phases = [charge.entry.slack for charge, _ in pairs], list[tuple]()
    by_group = any(count > 1 and why_by_group(charge) for charge, count in pairs)
    try:
        for charge, count in pairs:
            of_run = charge.reserved or []
            phases += of_run if by_group else accounting.for_people(of_run, max(1, count))
        if not by_group:
            return accounting.epsilon_with(slacks, phases, delta), THEOREM
        left = delta * (1 - SLACK_SHARE)
        ideal = accounting.group_epsilon(phases, left, people) if phases else 0.0
        more, missed = accounting.together(slacks, ideal, left)
        epsilon = float(ideal + more) if left + missed <= delta else math.inf
    except ConfigError:  # the loss is too large to be added up
        epsilon = math.inf
    return epsilon, GROUP if by_group else THEOREM


def left(accounts: Account, limit: Limit) -> float:
    """Epsilon, at the limit's delta, of the largest Gaussian mechanism that still fits."""
    limited = dataclasses.replace(accounts.under(limit), limits=[limit])

    def charge(mu: float) -> RunCost:
        number = max((each.entry.number for each in accounts.charges), default=0) + 1
        planned: list[tuple[accounting.Event, int]] = [(StepEvent(1 / mu, 1.0), 1)]
        entry = Entry(number, "", "", "", "", "", planned, (0.0, 0.0))
        return RunCost(entry, planned, "")

    if limited.total(limit.delta).adaptive >= limit.epsilon:
        return 0.0
    low, high = 1e-3, 2 * limit.epsilon + 1
    if not limited.fits(charge(low)):
        return 0.0
    while high / low > 1 + 1e-3:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if limited.fits(charge(middle)) else (low, middle)
    return accounting.gaussian_epsilon(low, limit.delta)


def _row(charge: RunCost, num_users: int, delta: float) -> dict[str, Any]:
    entry, released = charge.entry, charge.released
    alone = math.inf if released is None else accounting.epsilon(charge.reserved or [], delta)
    return {
        "run": Path(entry.place).name or entry.kind,
        "place": entry.place,
        "kind": entry.kind,
        "state": charge.state,
        "began": entry.began,
        "users": num_users,
        "releases": None if released is None else sum(count for _, count in released),
        "epsilon": to_json(alone),
        "guarantee": released is not None and not entry.label,
        "why_not": "without noise" if released is None else entry.label,
        "by_group": why_by_group(charge),
    }


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Table rows of the runs, with the columns of HEAD; a star marks what is no guarantee."""
    return [
        (
            each["run"],
            each["kind"],
            each["state"],
            each["began"],
            f"{each['users']:,}",
            "-" if each["releases"] is None else f"{each['releases']:,}",
            _shown(each["epsilon"]) + ("" if each["guarantee"] else "*"),
        )
        for each in result["runs"]
    ]


def table(result: dict[str, Any]) -> str:
    """The runs as a text table."""
    return "\n".join(aligned([HEAD, *rows(result)]))


def sentences(result: dict[str, Any]) -> list[str]:
    """Sentences on the cost and on what the limits leave."""
    delta = at_most(result["delta"], ".2e")
    runs, users = len(result["runs"]), f"{result['num_users']:,} users"
    total = f"Total over {runs} run{'' if runs == 1 else 's'} on texts of these {users}: "
    bad = [each for each in result["runs"] if not each["guarantee"] and each["releases"] != 0]
    lines = []
    if result["epsilon"] == "inf" and bad:
        names = ", ".join(
            f"{each['run']} ({in_words(each['why_not'])})" for each in bad[:MAX_NAMED]
        )
        names += ", ..." if len(bad) > MAX_NAMED else ""
        lines.append(
            f"{total}unlimited, because {len(bad)} of them had no guarantee: {names}. This is "
            "permanent: the released model may reveal these users' texts. For later trials use "
            "a ledger of their own (--budget-ledger), and for a release other users."
        )
    else:
        lines.append(
            f"{total}the cost of each user is at most epsilon = {_shown(result['epsilon'])} at "
            f"delta = {delta} ({_shown(result['sum_of_epsilons'])} if epsilons were added up)."
        )
        if runs > 1:
            lines.append(
                "If you looked at earlier results to decide on later runs (most people do), count "
                f"{_shown(result['epsilon_adaptive'])}, for a limit that was fixed before the "
                "first run."
            )
    lines += [f"Warning: {result['alike']}."] if result["alike"] else []
    lines += _of_several(result)
    for limit in result["limits"]:
        at = f"The limit is {limit['epsilon']:g} at delta = {at_most(limit['delta'], '.2e')}"
        if float(limit["spent"]) > limit["epsilon"]:
            spent = f"{_shown(limit['spent'])} is spent"
            lines.append(f"{at}. It is exceeded: {spent}. No further run is allowed.")
        else:
            most = f"epsilon = {at_least(float(limit['left']), '.4g')}"
            lines.append(
                f"{at}: {most} is left for one release with Gaussian noise. A training, whose "
                "losses are not quite Gaussian, may fit only with a little less."
            )
    if len(result["limits"]) > 1:
        lines.append("A run has to keep all of these limits: a later one does not lift an earlier.")
    if runs:
        lines.append(
            f"'epsilon alone' is at delta = {delta} for every run, and differs from the --epsilon "
            "of a run that was planned at another delta."
        )
        lines.append(
            "Not counted: losses of held-out users that were computed without noise, as by default "
            "(--eval-epsilon adds noise). No ledger has them."
        )
    if bad:
        lines.append("* no guarantee")
    return lines


def _of_several(result: dict[str, Any]) -> list[str]:
    """A sentence on several users together; none if there are no numbers."""
    rows = [each for each in result["several"] if each["people"] > 1]
    if not rows:
        return []
    numbers = ", ".join(f"{_shown(each['epsilon'])} for {each['people']:,}" for each in rows)
    line = f"Of several users together, all runs promise epsilon = {numbers}."
    line += f" {FIXED_USERS}"
    if len(result["runs"]) > 1:
        line += " It also holds only if no run was chosen by looking at the releases of others."
    if reasons := {each["by_group"]: each["run"] for each in result["runs"] if each["by_group"]}:
        why = ", ".join(f"{run} ({reason})" for reason, run in reasons.items())
        line += f" This is by group privacy, which is not tight, because of {why}."
    return [line]


def _shown(epsilon: float | str) -> str:
    return "inf" if epsilon == "inf" else at_most(float(epsilon), ".4g")
