"""What a plan says in the first line of a run's ledger, and in its summary."""

import dataclasses
from typing import Any

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


def claimed_fields(plan: Plan, epsilon: float, chain: str) -> dict[str, Any]:
    """What `summary.json` says of the guarantee: it follows from the plan and the ledger.

    Args: chain: the ledger's last link.
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
