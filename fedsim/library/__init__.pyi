from .run import (
    Run as Run,
    audit as audit,
    load as load,
    recommend as recommend,
    train as train,
)
