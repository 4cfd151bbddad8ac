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
    tuning              recommend, select: how to set it
    cli, library        what a person types, and what a person imports

Names are loaded when they are first used: `import fedsim` takes no time, and needs only the core of
the distribution `fedsim-dp`. A name whose packages are missing says which extra brings them.
"""

from importlib import metadata
from typing import Any

from lazy_loader import attach_stub

from fedsim.errors import optional

_of_stub, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("fedsim-dp")
    with optional():
        return _of_stub(name)
