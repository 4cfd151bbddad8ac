"""Synthetic text: a data set sampled from a protected model, with what is known about it.

`synthesize` is the command; `sampling` draws blocks of texts on workers, `prompts` says what texts
begin with.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
