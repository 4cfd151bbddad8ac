"""What a run is told: `PrivacyConfig` can change the guarantee, `RunConfig` cannot.

The split is a promise. Everything in `PrivacyConfig` is hashed into the ledger and fixed for the
life of a run; `RunConfig` says where data and results are, which model is trained how, and on what.
Field docstrings are the help texts of the command line.
"""

from fedsim.config.commands import AuditConfig, Personalization, PretrainConfig
from fedsim.config.flags import (
    as_dict,
    changed,
    changed_run,
    first_named,
    flags_of,
    renamed,
    run_config,
    settings_of,
    to_json,
    typed,
    types_of,
)
from fedsim.config.privacy import (
    ADD_OR_REMOVE,
    ZERO_OUT,
    Algorithm,
    MechanismConfig,
    PrivacyConfig,
    PrivacyTarget,
)
from fedsim.config.run import (
    OPERATIONAL,
    UPDATE,
    DataConfig,
    EngineConfig,
    MeshShape,
    ModelConfig,
    RunConfig,
)

__all__ = [
    "Algorithm",
    "AuditConfig",
    "DataConfig",
    "MechanismConfig",
    "MeshShape",
    "EngineConfig",
    "ModelConfig",
    "OPERATIONAL",
    "UPDATE",
    "Personalization",
    "PretrainConfig",
    "PrivacyConfig",
    "PrivacyTarget",
    "ADD_OR_REMOVE",
    "ZERO_OUT",
    "RunConfig",
    "as_dict",
    "changed",
    "changed_run",
    "first_named",
    "flags_of",
    "renamed",
    "run_config",
    "settings_of",
    "to_json",
    "typed",
    "types_of",
]
