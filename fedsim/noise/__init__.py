"""The noise of a step, as independent Gaussian numbers."""

from fedsim.noise.independent import add_gaussian

__all__ = ["add_gaussian"]
