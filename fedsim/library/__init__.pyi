from .commands import (
    audit as audit,
    recommend as recommend,
)
from .run import (
    Run as Run,
    TrainSettings as TrainSettings,
    load as load,
    train as train,
)
