"""Clipped sums: one signature, several strategies; `scan` is the oracle of the others."""

from fedsim.clipping.clip import Clip
from fedsim.clipping.scan import Buckets, LocalSteps
from fedsim.clipping.strategy import Strategy, clip_chunk

__all__ = ["Buckets", "Clip", "LocalSteps", "Strategy", "clip_chunk"]
