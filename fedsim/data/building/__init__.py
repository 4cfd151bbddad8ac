"""Build a data set from files with a user column: read, check, tokenise, sort.

`build` runs the stages, in several processes. `sources` and `text_files` read; `columns`,
`messages` and `user_ids` normalise the values of a row; `tokenised` and `sorting` write and sort
rows that need not fit in memory.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
