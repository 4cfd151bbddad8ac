from . import optimizers as optimizers
from .callbacks import Callback as Callback, expect_callbacks as expect_callbacks
from .open import Purpose as Purpose, open_run as open_run
from .optimizers import (
    Diverged as Diverged,
    Noise as Noise,
    with_defaults as with_defaults,
)
from .prepare import (
    facts_of_start as facts_of_start,
    prepare_run as prepare_run,
    with_plan as with_plan,
)
from .private_evaluation import (
    DIRECTORY as DIRECTORY,
    FILE as FILE,
    SPLIT as SPLIT,
    Evaluated as Evaluated,
)
from .trainer import (
    Trainer as Trainer,
    dry_run as dry_run,
    expect_runnable as expect_runnable,
    train as train,
)
