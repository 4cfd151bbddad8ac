"""`recommend` and `audit`: the answers of the commands of these names, as dicts.

They write only warnings on the terminal unless `output` is given.
"""

from typing import Any, Unpack

from fedsim.config import (
    Algorithm,
    AuditConfig,
    MechanismConfig,
    PrivacyTarget,
    RunConfig,
    flags_of,
    unknown_setting,
)
from fedsim.engine import set_threads
from fedsim.errors import expect
from fedsim.library.run import COLUMNS, TrainSettings, configs_for
from fedsim.run import Console, verbosity


def recommend(data: Any, *, users: int = 128, **settings: Unpack[TrainSettings]) -> dict[str, Any]:
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    It looks at the data without protection; "non_private" says at what.

    Args:
      users: number of users whose gradients are measured.
      data, settings: as for `train`; run_dir is the parent of the recommended directories, by
        default runs/.

    Returns:
      What `fedsim recommend --json` prints: the better algorithm is `answer["recommended"]`, and
      `answer["els"]["settings"]` are arguments of `train("els", ...)`.

    Raises:
      ConfigError: a setting or the data are wrong, or settings has one that is recommended.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        known = flags_of(PrivacyTarget) | flags_of(MechanismConfig) | flags_of(RunConfig)
        for name in settings.keys() - known.keys() - COLUMNS.keys():
            raise unknown_setting(name, settings.get(name), known)
        privacy, run = configs_for(data, {"run_dir": "runs", **settings}, "")
        set_threads(run.engine)
        from fedsim.tuning import recommend as advise  # imports JAX, which reads the threads

        return advise(privacy, run, Console(), num_users=users)


def audit(
    algorithm: str,
    data: Any,
    *,
    gradient_canaries: int = 400,
    confidence: float = 0.999,
    **settings: Unpack[TrainSettings],
) -> dict[str, Any]:
    """Attack a training: plant made-up users (canaries), train, and guess which took part.

    Args:
      algorithm, data, settings: the training, as for `train`.
      gradient_canaries: number of made-up users; see `AuditConfig`.
      confidence: of a refutation.

    Returns:
      The content of audit.json, which `fedsim audit --json` prints. "holds" is False if the claim
      is refuted, True if it could have been and was not, None if it could not.

    Raises:
      ConfigError: a setting or the data are wrong; one line says how.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
        attack = AuditConfig(gradient_canaries, confidence)
        privacy, run = configs_for(data, settings, f"audit-{algorithm}")
        set_threads(run.engine)
        from fedsim.trust import audit as attack_training

        return attack_training(Algorithm(algorithm), attack, privacy, run, Console())
