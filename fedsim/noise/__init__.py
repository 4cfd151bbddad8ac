"""Noise on a lattice: Gaussian, for the sum of a step and for single numbers.

independent    noise that is independent across steps, and its distance from ideal noise
correlated     noise of which each step subtracts part of the last steps' noise
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
