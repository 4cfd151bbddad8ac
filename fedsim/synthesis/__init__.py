"""Synthetic text: a data set sampled from a protected model, with what is known about it.

data_set      the command
prompts       what texts begin with, and rows of their tokens
sampling      blocks of texts, drawn on workers
filters       what is thrown away, by a look at the synthetic texts alone
rows          synthetic texts as the rows of a data set
quality       how much like users' texts a set is, and what a model learns from it
leaks         whether training users' texts are in it
page          the page that goes with a set, and the one that stays with whoever made it
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
