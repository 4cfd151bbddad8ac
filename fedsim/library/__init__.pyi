from .commands import (
    AuditResult as AuditResult,
    Recommendation as Recommendation,
    audit as audit,
    recommend as recommend,
)
from .run import (
    MechanismSettings as MechanismSettings,
    Run as Run,
    RunSettings as RunSettings,
    TrainSettings as TrainSettings,
    load as load,
    train as train,
)
