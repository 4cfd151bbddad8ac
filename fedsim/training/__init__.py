"""What both algorithms share: a run from its settings to its summary.

    train    a run, or the rest of one: `start` has all that is before its first step
    Trainer    the loop: gradient, ledger, update, evaluation, checkpoint (`trainer`)

An algorithm (`els`, `uls`) gives the privatised gradient of a step; the rest is here.
"""

from fedsim.training.launch import train
from fedsim.training.resolve import expect_strategy, outside, settled_by, strategy_for
from fedsim.training.trainer import Trainer

__all__ = ["Trainer", "expect_strategy", "outside", "settled_by", "strategy_for", "train"]
