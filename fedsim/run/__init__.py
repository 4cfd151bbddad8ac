"""A run: its directory, what is stored there, and what it is started with.

`directory` owns the directory, `ledger` has what was released, `checkpoint` the state, `metrics`
what was measured, `console` what a person sees.
"""
