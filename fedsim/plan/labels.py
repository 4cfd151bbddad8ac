"""What epsilon holds under, in words, and what makes it no guarantee."""

from collections.abc import Mapping
from typing import Any

from fedsim.config import ADD_OR_REMOVE, ZERO_OUT
from fedsim.config.cells import COMPARISON_ONLY

SHARED = "shared"
ADJACENCY = {
    ZERO_OUT: "zero out one user's texts, the number of users being public",
    ADD_OR_REMOVE: "add or remove one user",
    SHARED: "zero out all texts that one user owns, alone or with others, who owns which being "
    "public and fixed",
}
REPRODUCTION = "of a seed that others may know or guess: a reproduction, not a guarantee"
TRIAL = "of one trial of a private selection, which costs more: not a guarantee"
UNPROVEN = "with a strategy whose bound on contributions is not proven: not a guarantee"
"""Of earlier versions, which had such strategies."""


def holds(plan: Mapping[str, Any]) -> str:
    """What epsilon holds under: the adjacency, or a label that says that it is no guarantee.

    Args: plan: the fields of a plan.
    """
    return label_of(plan) or ADJACENCY[SHARED if plan.get("shared") else plan["adjacency"]]


def label_of(plan: Mapping[str, Any]) -> str:
    """What makes epsilon no guarantee; empty where nothing does.

    Args: plan: the fields of a plan, or a summary, which has them, too.
    """
    labels = [COMPARISON_ONLY] if plan["sampling_run"] != plan["sampling_accounted"] else []
    if (assumed_population := plan.get("assumed_population")) is not None:
        assumed = f"as if there were {assumed_population:,} users"
        labels.append(f"{assumed}: an assumption, not a guarantee")
    labels += [UNPROVEN] if plan.get("unproven") else []
    labels += [TRIAL] if plan.get("trial") else []
    labels += [REPRODUCTION] if plan.get("seeded") else []
    return "; ".join(labels)
