"""What NIST SP 800-226 (2025) asks of a claim of differential privacy, and a run's answers.

The publication draws its questions as a pyramid: the guarantee on top, what it rests on below. The
questions are in our words; each answer says what holds, or that it does not.
"""

from typing import Any

from fedsim.accounting.rounding import at_most
from fedsim.trust.claim import Released
from fedsim.trust.claim_fields import adjacency, all_runs, held_out, mechanism, slack, unit
from fedsim.trust.document import Table


def answers(released: Released) -> list[Any]:
    """A table with a row for each question."""
    return [
        "What the publication asks of whoever claims differential privacy, from the top of its "
        "pyramid to the bottom:",
        Table(("level", "question", "answer"), [*_guarantee(released), *_below(released)]),
    ]


def _guarantee(released: Released) -> list[tuple[str, str, str]]:
    plan, top = released.plan, "guarantee"
    size = "no epsilon holds: there is no noise"
    if released.phases is not None:
        delta = at_most(plan.delta, ".2e")
        size = f"epsilon = {at_most(released.epsilon, '.4f')} at delta = {delta}"
        size += f" ({released.label})" if released.label else "; the whole curve is above"
    return [
        (top, "how large are the privacy parameters?", size),
        (top, "what is the unit of privacy?", unit(plan)),
        (top, "which data sets are neighbours?", adjacency(plan)),
        (top, "what else was released of the same people?", all_runs(released)),
        (
            top,
            "is anything released without protection?",
            "; ".join(plan.non_private) or "nothing is known to be",
        ),
    ]


def _below(released: Released) -> list[tuple[str, str, str]]:
    middle, bottom = "algorithm", "deployment"
    held = sum(check.holds is True for check in released.checks)
    return [
        (middle, "which mechanism, and is it implemented right?", mechanism(released.plan)),
        (
            middle,
            "was that checked?",
            f"{held} of {len(released.checks)} promises were held against the run's files when "
            "this was written; `fedsim verify --whole` computes every step again, `fedsim audit` "
            "attacks a training like this one",
        ),
        (
            middle,
            "how useful is what comes out, and for whom is it worse?",
            f"loss on {held_out(released)} is among the settings and results; whether some groups "
            "of users are served worse is not measured here",
        ),
        (
            middle,
            "are there gaps of floating point, and where does randomness come from?",
            "whole numbers on a public lattice, noise from AES-128 in counter mode: "
            + slack(released)
            if released.phases is not None
            else "there is no noise",
        ),
        (
            bottom,
            "whom must one trust?",
            "central: whoever trains sees the texts; nobody else has to be trusted",
        ),
        (
            bottom,
            "who may ask questions of the data?",
            "nobody: the model is trained once and released, and using it costs no more",
        ),
        (
            bottom,
            "are there side channels?",
            "times, power and memory of the machine are not protected; sizes of draws and step "
            "times are kept out of what is made to be published",
        ),
        (
            bottom,
            "how are data and key kept?",
            "by whoever trains: the key is in `secret.json`, which its owner alone may read; the "
            "texts stay where they were",
        ),
        (
            bottom,
            "how were the data collected?",
            "not known to this report: differential privacy does not protect from whoever "
            "collected them",
        ),
    ]
