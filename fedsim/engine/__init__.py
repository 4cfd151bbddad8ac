"""Engines: where gradients are computed. Ray is imported below this package alone."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
