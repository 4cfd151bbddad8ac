"""The noise of a step, as Gaussian numbers on a lattice.

independent    of every step for itself, and how far it is from the ideal
correlated     each step takes back part of the noise of the steps before
toeplitz       how much of it, and what that does to sums of steps
bands          of how many steps
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
