"""Clipped sums: one signature, several strategies; `scan` is the oracle of the others."""

from fedsim.clipping.clip import Clip
from fedsim.clipping.scan import Buckets, LocalSteps
from fedsim.clipping.strategy import Strategy, clipped_sum

__all__ = ["Buckets", "Clip", "LocalSteps", "Strategy", "clipped_sum"]
