"""fedsim for people who write Python: `train`, `load`, and the `Run` that both return."""

from fedsim.library.run import Run, load
from fedsim.library.training import TrainSettings, train

__all__ = ["Run", "TrainSettings", "load", "train"]
