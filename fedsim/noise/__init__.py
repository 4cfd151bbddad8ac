"""The noise of a step, as independent Gaussian numbers on a lattice."""

from fedsim.noise.independent import Slack, add_gaussian, gaussian, in_blocks, release_shift, slack

__all__ = ["Slack", "add_gaussian", "gaussian", "in_blocks", "release_shift", "slack"]
