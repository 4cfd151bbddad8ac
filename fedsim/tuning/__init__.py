"""How to set a training: `recommend`, with Algorithm 3 (`doubling`) and its inputs; `sweep`."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
