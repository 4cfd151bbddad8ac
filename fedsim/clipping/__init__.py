"""Clipped sums of units' gradients, in whole numbers, each contribution of a proven norm.

contribution    the clip function, its sensitivity, the proof of a contribution's norm, and passes
strategy        `clip_chunk`: by `scan`, the oracle of the others, `direct` or `ghost`
ghost           the strategy `ghost`, which forms no gradient of a large matrix
packing         units in few static shapes, and short texts in shared rows
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
