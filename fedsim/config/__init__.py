"""Settings: `PrivacyConfig` can change the privacy guarantee, `RunConfig` cannot.

The split is a promise. Everything in `PrivacyConfig` is hashed into the ledger and fixed for the
life of a run; `RunConfig` has the places of data and results, the model, the optimizer and the
engine. Attribute docstrings of both are the help texts of the command line.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
