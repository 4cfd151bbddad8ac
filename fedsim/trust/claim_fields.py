"""Facts about a run for the templates of pages, and phrases that several documents share."""

import math
from typing import Any

from fedsim.accounting import at_most
from fedsim.budget import together
from fedsim.config import COMPARISON_ONLY, ZERO_OUT, Algorithm
from fedsim.errors import FedsimError
from fedsim.plan import Plan
from fedsim.trust.claim import Released, claim


def facts(released: Released) -> dict[str, Any]:
    """What the templates of report and card need to list what was done."""
    plan = released.plan
    return {
        "run": released,
        "plan": plan,
        "claim": claim(released),
        "private": released.phases is not None,
        "label": released.label,
        "els": plan.algorithm == Algorithm.ELS,
        "prob": plan.accounted_prob * plan.sampling.bands,
        "unit": unit(plan),
        "adjacency": adjacency(plan),
        "mechanism": mechanism(plan),
        "slack": slack(released),
        "held_out": held_out(released),
        "all_runs": all_runs(released),
        "tuning": tuning(plan),
        "comparison_only": COMPARISON_ONLY,
    }


def tuning(plan: Plan) -> list[str]:
    """Settings that were chosen by looking at the data, without being accounted."""
    return [fact for fact in plan.non_private if "chosen by looking" in fact]


def mechanism(plan: Plan) -> str:
    """The algorithm by name."""
    els = plan.algorithm == Algorithm.ELS
    name = "DP-SGD-ELS (Algorithm 1)" if els else "DP-SGD-ULS (Algorithm 2)"
    if plan.adaptive:
        name += ", with a clip norm that follows a quantile of the norms privately"
    if plan.noisy_loss:
        name += ", with each step's training loss, noise on it"
    return f"{name} of Charles et al. 2024: the Gaussian mechanism on a clipped sum"


def all_runs(released: Released) -> str:
    """What the ledger of the data says of all runs on the users of this one."""
    try:
        found = together(released.run_dir, released.plan.delta)
    except FedsimError:  # which names places on this machine: `fedsim verify` says it
        return "not known, for the ledger of the data is not what it was"
    if found is None:
        return "not known: their epsilons add up with this one's, and their deltas, too"
    total, delta = found.total, at_most(released.plan.delta, ".2e")
    if math.isinf(total.fixed):
        return f"{found.num_runs}, not all of which promise anything: together no epsilon holds"
    return (
        f"{found.num_runs}, which together cost nobody more than epsilon = "
        f"{at_most(total.fixed, '.4f')} at delta = {delta}; "
        f"{at_most(total.adaptive, '.4f')} if runs were chosen by looking at earlier ones, for a "
        "limit that was fixed before the first (`fedsim budget`)"
    )


def unit(plan: Plan) -> str:
    """Whom the guarantee protects."""
    if plan.shared is not None:
        return "a user: what is in all texts that an id in the data owns, alone or with others"
    return "a user: all texts with the same id in the data, one person's or not"


def adjacency(plan: Plan) -> str:
    """Which data sets are neighbours."""
    if plan.shared is not None:
        return (
            "data sets that differ in what is in the texts that one user owns; users, texts and "
            "who owns which are the same, and public"
        )
    if plan.adjacency == ZERO_OUT:
        return "data sets that differ by all texts of one user; the users are the same, and public"
    return "data sets that differ by one user with all texts, added or removed"


def held_out(released: Released) -> str:
    """What held-out losses are of. A text is held out if any of its owners is, so that other
    owners of it may be trained on."""
    return "texts of held-out users" if released.plan.shared else "users not trained on"


def slack(released: Released) -> str:
    """What of epsilon and delta is for noise that is not ideal."""
    part = released.plan.slack_after(released.num_steps)
    return f"{at_most(part.epsilon, '.1e')} of epsilon, {at_most(part.delta, '.1e')} of delta"
