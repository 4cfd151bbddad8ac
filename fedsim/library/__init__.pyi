from .run import (
    Run as Run,
    TrainSettings as TrainSettings,
    audit as audit,
    dry_run as dry_run,
    load as load,
    recommend as recommend,
    train as train,
)
