"""A run from its settings to its summary, for both algorithms.

    train      a run, or the rest of a resumed one (`launch`): open_run -> prepare_run -> launch
    dry_run    the plan of a run and the size of its steps (`launch`)
    open_run   directory, data, model, key and identity (`open`)
    prepare_run  refusals, private draws, plan, price, in this order (`prepare`)
    Trainer    the loop: gradient, ledger, update, evaluation, checkpoint (`trainer`)

An algorithm (`els`, `uls`) computes the privatised gradient of a step; everything else is here.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
