"""Build a data set from files with a user column: read, check, tokenise, sort.

`build` runs the stages. `sources`, `readers`, `text_files` and `hub` read; `columns`, `user_ids`
and `orders` normalise the values of a row; `tokenised` and `sorting` write and sort rows that need
not fit in memory; `processes` has the worker processes and the working directory.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
