"""Checks and reports of what a run claims: `verify`, `report`, `audit`, `budget`.

verify       each promise of a run, checked against its files (`evidence`, `ledger_checks`) and by a
             `replay`
report       privacy report, model card and published folder, from the `claim` of the ledger
published    what a stranger can check of a folder that `fedsim publish` made
audit        attacks: plants `canaries`, and tests the claim by guesses and by the noise in what was
             released (`bounds`)
budget       the privacy budget of users, one and several together
pages        Markdown and HTML from `templates/`, and charts
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
