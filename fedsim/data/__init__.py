"""Users' text: built from files (build, corpora), kept as a store (users), read as rows of tokens.

from fedsim.data import load; load("pydocs").train is a UserStore.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
