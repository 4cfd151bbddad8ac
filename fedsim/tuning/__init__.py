"""Choice of settings before and by training.

    recommend    algorithm and group size for data, with Algorithm 3 (`doubling`)
    select       the best of several candidates, chosen privately

`estimates` measures gradient norms, and `advice` has what is recommended.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
