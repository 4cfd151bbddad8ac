"""A run: its directory, what is stored there, and what it is started with.

`directory` owns the directory, `ledger` has what was released, `checkpoint` the state, `metrics`
what was measured, `console` what a person sees.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
