"""Users' text: built from files (build, corpora), kept as a store (users), read as rows of tokens.

from fedsim.data import load; load("pydocs").train is a UserStore.
"""

from fedsim.data.corpora import load
from fedsim.data.dataset import Dataset, stats
from fedsim.data.text import Tokenizer
from fedsim.data.users import UserStore
from fedsim.errors import DataError

__all__ = ["DataError", "Dataset", "Tokenizer", "UserStore", "load", "stats"]
