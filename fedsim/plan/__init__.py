"""The plan of a run: its public constants and the privacy that it will be able to claim.

facts       what a guarantee does not cover, as values
plan        the classes of a plan, and what ledger, summary and claims have of it
planner     the algorithm and its `Plan`, with calibrated noise
defaults    settings that the user left out, and warnings about settings
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
