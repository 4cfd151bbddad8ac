"""fedsim: fine-tune language models on people's text with user-level differential privacy.

    run = fedsim.train("uls", data=posts, user="author", text="body", epsilon=4, num_steps=500)
    run.epsilon, run.eval_loss, run.report()

The two algorithms of Charles et al. 2024 are `els` and `uls`; read them first. What they share has
a folder or a file each:

    sampling, clipping, noise, mechanism   who takes part; the clipped sum; the noise on it
    accounting          epsilon, delta and calibration
    plan, training, evaluate               the public constants; the loop around a step
    engine              where gradients are computed: this process, or Ray workers
    data, models        users' tokenised text; the transformer, pretrained models, LoRA
    run                 what a run leaves behind: directory, ledger, checkpoints, metrics
    trust               verify, report, audit: why anyone should believe it
    tuning              recommend, sweep: how to set it
    cli, library        what a person types, and what a person imports

Names are loaded when they are first used: `import fedsim` takes no time.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim import accounting, clipping, data
    from fedsim.accounting import PureEvent, StepEvent
    from fedsim.clipping import Clip
    from fedsim.els import ELS
    from fedsim.engine import EngineError, Task
    from fedsim.errors import ConfigError, DataError, FedsimError
    from fedsim.keys import SecretKey
    from fedsim.library import Run, TrainSettings, load, train
    from fedsim.uls import ULS

    __version__: str

_MODULES = ("accounting", "clipping", "data")
_NAMES = {
    **dict.fromkeys(("Run", "TrainSettings", "load", "train"), "library"),
    **dict.fromkeys(("PureEvent", "StepEvent"), "accounting"),
    **dict.fromkeys(("ConfigError", "DataError", "FedsimError"), "errors"),
    **dict.fromkeys(("EngineError", "Task"), "engine"),
    **{"ELS": "els", "ULS": "uls", "Clip": "clipping", "SecretKey": "keys"},
}
"""The module of each name that can be imported from here."""

__all__ = [
    "ELS",
    "ULS",
    "Clip",
    "ConfigError",
    "DataError",
    "EngineError",
    "FedsimError",
    "PureEvent",
    "Run",
    "SecretKey",
    "StepEvent",
    "Task",
    "TrainSettings",
    "__version__",
    "accounting",
    "clipping",
    "data",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("fedsim")
    if name in _MODULES:
        return import_module(f"fedsim.{name}")
    if name in _NAMES:
        return getattr(import_module(f"fedsim.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
