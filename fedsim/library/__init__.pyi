from .run import (
    Run as Run,
    TrainSettings as TrainSettings,
    audit as audit,
    load as load,
    recommend as recommend,
    train as train,
)
