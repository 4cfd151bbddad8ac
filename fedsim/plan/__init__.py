"""The plan of a run: its public constants and the privacy that it will be able to claim.

    fill_defaults                  fill in defaults; list the facts that the guarantee leaves out
    method_for, make_plan          the algorithm and its `Plan`, with calibrated noise
    Evaluations                    evaluations of held-out users with noise, and their cost
    ledger_head, claimed_fields    fields of ledger and summary that follow from the plan
    accounted_events               events that a claim counts, also for a run that was stopped
    holds                          the condition under which epsilon holds

`defaults` completes the settings, `planner` calibrates and makes the `plan`, whose parts are the
classes of `options`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
