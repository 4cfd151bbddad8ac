"""The privacy budget of a data set: what all runs on these people's texts have spent, together.

ledger       the ledger of the data: every run, append-only, chained, locked
marks        how far runs that have not ended have come: older copies of them are refused
people       whose texts a run saw: keyed fingerprints of users' ids
spending     what it adds up to, for the person who pays most; a privacy filter
admission    a run is counted before its first release, and refused where a limit would break
"""
