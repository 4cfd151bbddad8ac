"""What both algorithms share: a run from its settings to its summary.

    train      a run, or the rest of one: open_run -> plan_run -> launch().fit() (`launch`)
    open_run   directory, data, model, key and identity (`open`)
    plan_run   defaults, calibration, price, limits, strategy (`planned`)
    Trainer    the loop: gradient, ledger, update, evaluation, checkpoint (`trainer`)

`dry_run` plans a run and estimates its time and memory. An algorithm (`els`, `uls`) gives the
privatised gradient of a step; the rest is here.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
