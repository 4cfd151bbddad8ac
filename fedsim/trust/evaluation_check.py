"""Check, for `verify`, everything that was released of held-out users: evaluations with noise."""

from fedsim import accounting
from fedsim.accounting.rounding import at_most
from fedsim.evaluate import VALIDATION
from fedsim.plan import REPRODUCTION
from fedsim.run import metrics
from fedsim.training.private_evaluation import DIRECTORY, FILE, SPLIT, Evaluated
from fedsim.trust.evidence import Evidence, counted, demand

TOLERANCE = 1e-9  # relative: of other versions of the packages that add up


def check_evaluations(evidence: Evidence) -> str:
    """Check that evaluations cost at most what was planned, and that no other loss was shown.

    Returns: the finding in words. Raises: Violated, Unknown.
    """
    how, path = evidence.plan.evaluations, evidence.run_dir / FILE
    assert how is not None, "of a plan that has them"
    spent = accounting.epsilon(how.phases(how.count), how.delta - how.slack[1]) + how.slack[0]
    paid = spent <= how.epsilon * (1 + TOLERANCE)
    demand(paid, f"evaluations of epsilon {spent}: expected at most {how.epsilon}")
    losses = Evaluated(evidence.run_dir).losses
    last = evidence.plan.num_steps
    for step in losses:
        due = step <= evidence.num_steps and (step % how.every == 0 or step == last)
        demand(due, f"{path}: step {step}: expected none but each {how.every}th and the last")
    for line in metrics.read(evidence.run_dir):
        others = {name for split, name in VALIDATION.items() if split != SPLIT} & line.keys()
        demand(not others, f"{metrics.FILE}: step {line['step']}: {min(others, default='')}")
        shown = line.get(VALIDATION[SPLIT])
        same = shown is None or shown == losses.get(line["step"])
        demand(same, f"{metrics.FILE}: step {line['step']}: {shown}, which {FILE} does not have")
    run = evidence.key.seal("evaluation")
    label = REPRODUCTION if evidence.plan.seeded else ""
    found = counted(evidence.run_dir / DIRECTORY, run, label)
    return f"{len(losses)} of {how.count}, epsilon {at_most(how.epsilon, '.4g')}; {found}"
