"""What a run is told: `PrivacyConfig` can change the guarantee, `RunConfig` cannot.

The split is a promise. Everything in `PrivacyConfig` is hashed into the ledger and fixed for the
life of a run; `RunConfig` says where data and results are, which model is trained how, and on what.
Field docstrings are the help texts of the command line.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
