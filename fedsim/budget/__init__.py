"""The privacy budget of users: the cost of all runs on their texts together, and limits on it.

ledger       the ledger of the data: every run, append-only, chained, locked; keyed fingerprints of
             users; marks of how far running runs have come, by which older copies are refused
spending     the composed cost for the user who pays most; a privacy filter
admission    checks that a run fits the limits, and counts it before its first release
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
