"""Checks and reports of what a run claims: `verify`, `report`, `audit`, `budget`.

verify       each promise of a run, checked against its files (`evidence`, `ledger_checks`) and by a
             `replay`
published    what a stranger can check of a folder that `fedsim publish` made
report       privacy report, model card and registry entry, from the `claim` of the ledger
audit        attacks: plants `canaries`, and bounds epsilon by guesses (`bounds`) and by the noise
             in what was released (`noise_audit`)
budget_page  the privacy budget of users
people       what all runs of a ledger promise several people together
pages        Markdown and HTML from `templates/`, and charts
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
