"""Sampling of a step's units, contribution bounding, and each user's group of examples.

    sampler         of a step: Poisson, cyclic sampling or random allocation, and groups of ULS
    contributions   before the first step: the pool of ELS, groups of shared texts, group sizes

All draws are pure functions of (key, purpose, step, user); see `keys`. The object that draws the
units also returns the accountant's event, so a run and its accounting cannot disagree. No module
here reads text.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
