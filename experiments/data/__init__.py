"""What only the paper's data sets need: its recipes, and leaving out what other sources have.

`recipes` are the paper's preparations as options of `prepare`, which leaves rows out (`screen`,
with `neardup` and `urls`) and has the rest built by `fedsim.data.building.build`.
"""

from experiments.data.recipes import RECIPES, options_of
from experiments.data.screen import Screen, prepare

__all__ = ["RECIPES", "Screen", "options_of", "prepare"]
