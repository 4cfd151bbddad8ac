from .build import BuildConfig as BuildConfig
from .commands import (
    AuditConfig as AuditConfig,
    Sampling as Sampling,
)
from .flags import (
    RENAMED as RENAMED,
    as_dict as as_dict,
    changed as changed,
    changed_run as changed_run,
    computed_by as computed_by,
    first_named as first_named,
    flags_of as flags_of,
    meant as meant,
    renamed as renamed,
    run_config as run_config,
    settings_of as settings_of,
    to_json as to_json,
    typed as typed,
    types_of as types_of,
    unknown_setting as unknown_setting,
)
from .privacy import (
    ADD_OR_REMOVE as ADD_OR_REMOVE,
    ALLOCATION as ALLOCATION,
    CORRELATED as CORRELATED,
    CYCLIC as CYCLIC,
    INDEPENDENT as INDEPENDENT,
    MOST_DELTA as MOST_DELTA,
    ONLY_USERS as ONLY_USERS,
    POISSON as POISSON,
    ZERO_OUT as ZERO_OUT,
    Algorithm as Algorithm,
    MechanismConfig as MechanismConfig,
    PrivacyConfig as PrivacyConfig,
    PrivacyTarget as PrivacyTarget,
    SamplingName as SamplingName,
    default_delta as default_delta,
)
from .run import (
    ALL_LINEAR as ALL_LINEAR,
    OPERATIONAL as OPERATIONAL,
    UPDATE as UPDATE,
    DataConfig as DataConfig,
    EngineConfig as EngineConfig,
    LoggerName as LoggerName,
    ModelConfig as ModelConfig,
    RunConfig as RunConfig,
)
