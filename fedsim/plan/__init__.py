"""The public constants of a run, and what it will be able to claim.

complete    fills in what the user left out, and names what that looked at
method_for, make_plan    the algorithm and its `Plan`, noise calibrated
Evaluations    what evaluating held-out users with noise costs them
ledger_head, claimed_fields    what of it ledger and summary say
claimed_phases    what a claim counts, also of a run that was stopped
holds    what epsilon holds under, or what makes it no guarantee
"""

from fedsim.plan.defaults import bands_predicted, complete
from fedsim.plan.evaluations import TWO_HELD_OUT, Evaluations, delta_of, evaluations_of, noise_of
from fedsim.plan.options import (
    ADJACENCY,
    REPRODUCTION,
    TRIAL,
    AllocatedSampling,
    AnySampling,
    Audit,
    CorrelatedNoise,
    CyclicSampling,
    IndependentNoise,
    PoissonSampling,
    Release,
    SharedTexts,
    ShuffledSampling,
    Trial,
    holds,
)
from fedsim.plan.plan import Plan
from fedsim.plan.planner import (
    MOST_PARAMETERS,
    before_of,
    calibrate,
    drawn_once,
    expect_affordable,
    make_plan,
    method_for,
    planned_phases,
    sampling_for,
    sharing,
)
from fedsim.plan.records import claimed_fields, claimed_phases, ledger_head

__all__ = [
    "ADJACENCY",
    "MOST_PARAMETERS",
    "REPRODUCTION",
    "TWO_HELD_OUT",
    "TRIAL",
    "AllocatedSampling",
    "AnySampling",
    "Audit",
    "CorrelatedNoise",
    "CyclicSampling",
    "Evaluations",
    "IndependentNoise",
    "Plan",
    "PoissonSampling",
    "Release",
    "SharedTexts",
    "ShuffledSampling",
    "Trial",
    "bands_predicted",
    "before_of",
    "calibrate",
    "claimed_fields",
    "claimed_phases",
    "complete",
    "delta_of",
    "drawn_once",
    "evaluations_of",
    "expect_affordable",
    "holds",
    "ledger_head",
    "make_plan",
    "method_for",
    "noise_of",
    "planned_phases",
    "sampling_for",
    "sharing",
]
