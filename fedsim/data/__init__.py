"""Users' text: built from files, kept in a store, read as rows of token ids.

`from fedsim.data import load; load("pydocs").train` is a UserStore. `corpora` finds or builds data,
`building` builds it, `without` copies it without some users, `dataset` has the splits, `users` and
`store` read and write one split.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
