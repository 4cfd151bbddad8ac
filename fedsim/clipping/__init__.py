"""Clipped sums: one signature, several strategies; `scan` is the oracle of the others."""

from fedsim.clipping.clip import Clip
from fedsim.clipping.scan import clipped_sum

__all__ = ["Clip", "clipped_sum"]
