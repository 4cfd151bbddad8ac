"""The public constants of a run, and what it will be able to claim.

complete    fills in what the user left out, and names what that looked at
method_for, make_plan    the algorithm and its `Plan`, noise calibrated
Evaluations    what evaluating held-out users with noise costs them
ledger_head, claimed_fields    what of it ledger and summary say
claimed_phases    what a claim counts, also of a run that was stopped
holds    what epsilon holds under, or what makes it no guarantee
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
