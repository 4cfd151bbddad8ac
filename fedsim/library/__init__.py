"""fedsim for people who write Python: `train`, `load`, and the `Run` that both return."""

from fedsim.library.run import Run, load
from fedsim.library.training import train

__all__ = ["Run", "load", "train"]
