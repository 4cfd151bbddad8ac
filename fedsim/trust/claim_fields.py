"""What a report says of a run, item by item, and in words that other documents share.

The list is that of "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3).
"""

import math

from fedsim.accounting.rounding import at_least, at_most
from fedsim.budget.admission import together
from fedsim.config import ZERO_OUT, Algorithm
from fedsim.config.privacy import COMPARISON_ONLY
from fedsim.errors import FedsimError
from fedsim.plan import Plan
from fedsim.trust.claim import Released
from fedsim.trust.document import Table


def items(released: Released) -> Table:
    """The reporting list of Ponomareva et al. 2023, Section 5.3.3."""
    plan = released.plan
    els = plan.algorithm == Algorithm.ELS
    clipped = "text" if els else "user"
    prob = at_least(plan.accounted_prob * plan.bands, ".4g")
    law = (
        f"a mixture of Gaussians, Binomial({plan.group_size}, {prob}) (Theorem 1)"
        if els
        else f"a Gaussian, sampled with probability {prob} (Theorem 2)"
    )
    if plan.shared is not None and not els:
        law = (
            f"Gaussians sampled with probability {prob}, of which a user takes away one and "
            f"changes {plan.shared['max_changed']} (the theorem for texts with several owners)"
        )
    if plan.participations:
        window = plan.num_steps // plan.participations
        law = f"a Gaussian, in one of every {window:,} steps, uniformly chosen (random allocation)"
    if plan.bands > 1:
        law += f", of every {plan.bands} successive steps in one at most, the same for a user"
    same = "yes" if plan.sampling_run == plan.sampling_accounted else f"no: {COMPARISON_ONLY}"
    if plan.assumed_population is not None:
        assumed = f"that these users are a Poisson sample of {plan.assumed_population:,}"
        same += f"; but it is assumed, and not guaranteed, {assumed}"
    noise = "none" if released.phases is None else at_most(plan.noise_multiplier, ".6g")
    epsilon = "infinite: no noise"
    if released.phases is not None:
        epsilon = at_most(released.epsilon, ".4f")
    label = f" ({released.label})" if released.label else ""
    tuning = [fact for fact in plan.non_private if "chosen by looking" in fact]
    share = plan.group_size_epsilon
    before = "nothing" if share is None else f"choosing the group size: {share:g} of epsilon"
    rows = [
        ("setting", "central: whoever trains sees the texts; others see what is released"),
        ("unit of privacy", unit(plan)),
        ("adjacency", adjacency(plan)),
        ("released", "the parameters after every step, and the ledger"),
        ("mechanism", mechanism(plan)),
        ("clipping", f"{plan.clipping}, of each {clipped}'s gradient, to {plan.clip_norm:g}"),
        ("noise multiplier", noise),
        ("noise of different steps", _kind(plan)),
        ("texts of a user", _cap(plan)),
        *_of_several(plan),
        ("divided by", f"{plan.expected_count}, the expected number, whatever was drawn"),
        ("epsilon, delta", f"{epsilon}, {at_most(plan.delta, '.3e')}{label}"),
        ("of it, for noise that is not ideal", slack(released)),
        ("steps accounted", _steps(released)),
        ("accountant", f"privacy loss distribution, upper bound; each step {law}"),
        ("sampling that was run", plan.sampling_run),
        ("sampling that was accounted", plan.sampling_accounted),
        ("are the two the same", same),
        ("accounted before training", before),
        ("tuning of settings", "; ".join(tuning) or "none reported; none is accounted"),
        ("all runs on these users", all_runs(released)),
    ]
    return Table(("item", "this run"), rows)


def _steps(released: Released) -> str:
    counted, planned = released.num_steps, f"of {released.plan.num_steps} planned"
    if counted == released.num_released:
        return f"{counted} {planned}"
    return (
        f"{counted} {planned}, of which {released.num_released} were released: a run that ended "
        "before its last step costs what all of them cost, for it may have been stopped by looking "
        "at what it had released"
    )


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


def _of_several(plan: Plan) -> list[tuple[str, str]]:
    """What is said of texts with several owners, where there are."""
    if (shared := plan.shared) is None:
        return []
    return [
        (
            "texts with several owners",
            f"{shared['with_several_owners']:,} of {plan.num_examples:,}",
        ),
        (
            "texts left out, to bound how often a user takes part",
            f"{shared['left_out']:,} of {plan.num_examples:,}, drawn once, by who owns which alone",
        ),
    ]


def _kind(plan: Plan) -> str:
    if plan.strategy is None:
        return "independent"
    return f"correlated: each step takes back part of that of the {plan.bands - 1} steps before"


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


def _cap(plan: Plan) -> str:
    if plan.algorithm == Algorithm.ELS:
        return f"at most {plan.group_size} in all of the training, drawn once"
    if plan.shared is not None:
        groups = f"in groups of others: at most {plan.shared['max_changed']} groups"
        return f"in the user's own group: at most {plan.group_size} in a step; {groups}"
    return f"at most {plan.group_size} in a step, whose mean gradient is clipped as one"
