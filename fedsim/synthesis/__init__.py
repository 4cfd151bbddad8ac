"""Synthetic text: a data set sampled from a protected model, with what is known about it.

data_set      the command
prompts       what texts begin with, and rows of their tokens
sampling      blocks of texts, drawn on workers
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
