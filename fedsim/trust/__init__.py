"""Why anyone should believe a run: `verify` (evidence, replay), `report` (claim), `audit`.

`audit` plants `canaries` and bounds epsilon from below: from guesses (`bounds`), and from
the noise that is left (`noise_audit`); `pages` writes their pages from `templates`, with the charts
of `plots`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
