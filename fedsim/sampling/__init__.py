"""Who takes part: the draw of a step's units, contribution bounding, a user's group of examples.

    poisson         Poisson sampling, and the shuffling that it is compared with
    allocation      every user equally often, at random steps
    cyclic          Poisson sampling from one of several groups of users, in turn
    contributions   the pool of ELS, a user's examples in a step of ULS
    shared          both where examples have several owners

All are pure functions of (key, purpose, step, user); see `keys`. What is accounted comes from the
object that drew the units, so the run and its accounting cannot disagree. Does not read any text.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
