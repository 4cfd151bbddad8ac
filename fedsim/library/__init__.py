"""The Python interface: `train`, `load`, and the `Run` that both return; `dry_run`, `recommend`
and `audit`."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
