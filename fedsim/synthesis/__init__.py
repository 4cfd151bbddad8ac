"""Synthetic texts of a trained model.

labels    how frequent each label is among users, released with noise
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
