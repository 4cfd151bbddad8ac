"""What a plan says in the first line of a run's ledger, and in its summary."""

import dataclasses
from typing import Any

from fedsim.accounting import Event, StepEvent
from fedsim.config import to_json
from fedsim.plan.plan import Plan


def ledger_head(plan: Plan, *, config_sha256: str, key_seal: str) -> dict[str, Any]:
    """The first line of a run's ledger: what is fixed for its life."""
    before = [{"what": "group_size", **dataclasses.asdict(event)} for event, _ in plan.before]
    return {
        "plan": plan.as_dict(),
        "adjacency": plan.compared,
        "slack": plan.slack._asdict(),
        "key_seal": key_seal,
        "config_sha256": config_sha256,
        **({"before": before} if before else {}),
    }


def claimed_phases(
    plan: Plan, released: list[tuple[Event, int]] | None
) -> list[tuple[Event, int]] | None:
    """What a claim counts, to the accountant: all that was released, and the steps that were left.

    A run that ended before its last step may have been stopped because of what it had released, and
    then the steps until there give away more than if their number had been fixed beforehand. How it
    ended follows from all the steps it would have released: their epsilon holds for every rule of
    stopping (docs/theory/budget.md).
    Args: released: of a ledger; None: without noise. Where nothing was released, nothing counts.
    """
    event = plan.event()
    if not released or event is None:
        return released
    done = sum(n for each, n in released if isinstance(each, StepEvent))
    left = max(0, plan.num_steps - done)
    last, count = released[-1]
    if last == event:  # one cycle may hold the last step that was released and the next one
        return [*released[:-1], (event, count + left)]
    return [*released, (event, left)]


def claimed_fields(plan: Plan, epsilon: float, chain: str) -> dict[str, Any]:
    """What `summary.json` says of the guarantee: it follows from the plan and the ledger.

    Args: epsilon: of `claimed_phases`. chain: the ledger's last link.
    """
    realised = "gradients_computed and wall_seconds (sizes of the draws)"
    return {
        **plan.as_dict(),
        "non_private": [*plan.non_private, realised],
        "epsilon": to_json(epsilon),
        "epsilon_holds": plan.epsilon_holds,
        "adjacency": plan.compared,
        "privacy_unit": "user",
        "gradient_noise_multiplier": plan.gradient_noise_multiplier,
        "slack": plan.slack._asdict(),
        "ledger_chain": chain,
    }
