"""What the runs of a ledger promise several people together; docs/theory/people.md.

The numbers hold if no run was chosen by looking at the releases of others.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from fedsim import accounting
from fedsim.accounting import SelectionEvent, StepEvent
from fedsim.budget import Charge
from fedsim.config import INDEPENDENT
from fedsim.errors import ConfigError
from fedsim.run import ledger as run_ledger
from fedsim.trust.claim import SLACK_SHARE

THEOREM, GROUP = "theorem", "group privacy"
FIXED_USERS = (
    "This holds for users who were named before anybody saw a release: for those who were chosen "
    "by looking at one, delta is to be multiplied by the number of sets that could be chosen."
)


def why_by_group(charge: Charge) -> str:
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
    independent = head["plan"].get("noise", INDEPENDENT) == INDEPENDENT
    return "" if independent else "correlated noise"


def composed(
    charges: Sequence[Charge], counts: Sequence[int], people: int, delta: float
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
