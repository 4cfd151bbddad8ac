"""From files with a user column to a built directory: read, check, tokenise, sort.

`build` is the whole of it, `sources` and `readers` read, `columns` and `domains` say whose a row
is, `tokenised` and `sorting` write and sort what need not fit in memory, `hub` streams data sets of
the Hugging Face Hub.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
