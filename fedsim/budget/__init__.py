"""The privacy budget of a data set: what all runs on these people's texts have spent, together.

ledger       the ledger of the data: every run, append-only, chained, locked
marks        how far runs that have not ended have come: older copies of them are refused
people       whose texts a run saw: keyed fingerprints of users' ids
spending     what it adds up to, for the person who pays most; a privacy filter
applicant    whether a run fits under the limits, and how many of its steps would
admission    it is counted before its first release, and what it released when it ends
receipt      where a run is counted, and what the ledger says of it
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
