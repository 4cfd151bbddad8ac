"""Checks of a ledger against the plan in its head: they need neither key, data nor settings.

`verify` makes them of a run, and of a folder that `fedsim publish` made.
"""

import math
from pathlib import Path
from typing import Any

from fedsim import accounting
from fedsim.accounting import RunningEpsilon, at_least, at_most, event_fields
from fedsim.config import Algorithm
from fedsim.plan import Plan, accounted_events
from fedsim.run import ledger
from fedsim.trust.evidence import TOLERANCE, Record, require

RUNNING_TOLERANCE = 10 * accounting.RELATIVE_ACCURACY  # grids depend on the step
LOOKED_AT = 12  # epsilons of steps that are computed again; others must lie between them


def check_head(path: Path, head: dict[str, Any], plan: Plan) -> None:
    """Adjacency, slack and what came before the first step follow from the plan.

    Args:
      path: of the ledger, for errors.
    """
    require(head.get("adjacency") == plan.compared, f"{path}: the head has another adjacency")
    slack = plan.slack._asdict()
    require(head.get("slack") == slack, f"{path}: the head has another slack than {slack}")
    before = [each["epsilon"] for each in head.get("before", [])]
    demanded = [event.epsilon for event, _ in plan.before]
    require(before == demanded, f"{path}: before={before}: expected {demanded}, as in the plan")


def check_constants(plan: Plan) -> None:
    """The constants of a plan follow from each other."""
    sampling = plan.sampling
    share = plan.expected_count / plan.num_units
    if sampling.participations is not None:
        # Participations decide; count and budget follow, rounded.
        share = 1 / (plan.num_steps // sampling.participations)
    require(sampling.prob == share, f"sampling_prob={sampling.prob}: expected {share}")
    each = 1 if plan.algorithm == Algorithm.ELS else plan.group_size
    count = plan.budget // each
    require(plan.expected_count == count, f"expected_count={plan.expected_count}: not {count}")


def described(plan: Plan) -> str:
    """Algorithm, steps and noise of a plan."""
    noise = f"noise multiplier {at_most(plan.noise_multiplier, '.6g')}"
    return f"{plan.algorithm}, {plan.num_steps} steps, {noise}"


def check_events(evidence: Record) -> str:
    """Every line is as the plan demands."""
    plan = evidence.plan
    event = plan.event()
    demanded = {
        "event": event and event_fields(event),
        "sampling_run": plan.sampling.kind,
        "sampling_accounted": plan.sampling.kind,
    }
    path = evidence.run_dir / ledger.FILE
    for line in ledger.steps_of(evidence.lines):
        for name, value in demanded.items():
            noted = line.get(name)
            same = noted == value
            require(same, f"{path}: step {line['step']}: {name}={noted}: expected {value}")
    most = f"{evidence.num_steps} steps: expected at most {plan.num_steps}"
    require(evidence.num_steps <= plan.num_steps, f"{path}: {most}")
    if event is None:
        return "no noise in every step"
    cycle = f", in one of {event.cycle} successive steps" if event.cycle > 1 else ""
    return (
        f"in every step noise multiplier {at_most(event.noise_multiplier, '.6g')}, "
        f"sampling probability {at_least(event.sampling_prob, '.6g')}, "
        f"at most {event.max_contributions} drawn per user{cycle}"
    )


def check_epsilon(evidence: Record) -> str:
    """All planned steps together cost no more than the target epsilon."""
    plan = evidence.plan
    claimed = accounted_events(plan, ledger.phases(evidence.lines))
    if claimed is None:
        require(math.isinf(plan.target_epsilon), "steps without noise: epsilon is infinite")
        return "no noise: epsilon is infinite, as asked for"
    spent = accounting.epsilon(claimed, plan.delta)
    most = plan.target_epsilon * (1 + TOLERANCE)
    require(spent <= most, f"epsilon={spent}: expected at most {plan.target_epsilon}")
    path = evidence.run_dir / ledger.FILE
    steps = ledger.steps_of(evidence.lines)
    shown = [(step, line.get("epsilon")) for step, line in enumerate(steps, 1)]
    check_running(evidence, path, shown)
    epsilon, delta = at_most(spent, ".6g"), at_most(plan.delta, ".2e")
    return f"{epsilon} at delta {delta}, recomputed from the ledger's events"


def check_running(evidence: Record, path: Path, shown: list[tuple[int, Any]]) -> None:
    """Recompute some reported epsilons, and check that the rest are monotone between them.

    Args:
      path: of the file, for errors.
      shown: (number of steps, reported epsilon or None).
    """
    plan, event = evidence.plan, evidence.plan.event()
    shown = sorted((steps, epsilon) for steps, epsilon in shown if epsilon is not None)
    if event is None:
        for steps, epsilon in shown:
            require(epsilon == "inf", f"{path}: epsilon={epsilon} after step {steps}: expected inf")
        return
    running = RunningEpsilon(event, plan.delta, plan.before)
    every, last = max(1, len(shown) // LOOKED_AT), len(shown) - 1
    least = 0.0
    for place, (steps, epsilon) in enumerate(shown):
        fault = f"{path}: epsilon={epsilon} after step {steps}: expected"
        require(isinstance(epsilon, int | float), f"{fault} a number")
        require(epsilon >= least * (1 - RUNNING_TOLERANCE), f"{fault} at least {least}, as before")
        if place % every == 0 or place == last:
            same = math.isclose(epsilon, spent := running(steps), rel_tol=RUNNING_TOLERANCE)
            require(same, f"{fault} {spent}")
        least = max(least, epsilon)
