"""`recommend` and `audit`: what the commands of these names do, as functions.

They return objects, and write only warnings on the terminal unless `output` is given.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

from fedsim.config import Algorithm, AuditConfig, unknown_setting
from fedsim.engine import set_threads
from fedsim.errors import expect
from fedsim.library.run import (
    MechanismSettings,
    TrainSettings,
    configs_for,
    directory_of,
)
from fedsim.run import Console, verbosity
from fedsim.tuning import Advice, Cell

OF_MECHANISM = frozenset(MechanismSettings.__annotations__)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The better algorithm for some data, and settings for both; printed, it is the answer of
    `fedsim recommend`."""

    algorithm: Literal["els", "uls"]
    """The algorithm with less noise on sums of gradients."""
    reason: str
    els: Advice
    uls: Advice
    non_private: tuple[str, ...]
    """Facts that were read off the data without noise."""
    details: Mapping[str, Any] = dataclasses.field(repr=False)
    """All results, as `fedsim recommend --json` prints them."""

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for `fedsim.train(recommendation.algorithm, **recommendation.settings)`."""
        return dict((self.els if self.algorithm == "els" else self.uls).settings)

    def __str__(self) -> str:
        from fedsim.tuning import report

        return report(dict(self.details))


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Verdict on the epsilon of an attacked training; printed, it has a line for each test."""

    run_dir: Path
    """The audited run. Its data hold made-up users: do not release it."""
    epsilon: float
    """The claimed epsilon."""
    delta: float
    confidence: float
    """Confidence of a refutation by guesses."""
    holds: bool | None
    """False if the claim is refuted, True if it could have been and was not; None if it could
    not."""
    verdict: str
    """The same in words."""
    verdicts: Mapping[str, str]
    """The verdict of each test, by its name."""
    details: Mapping[str, Any] = dataclasses.field(repr=False)
    """The content of audit.json."""

    def __str__(self) -> str:
        from fedsim.trust import sentence

        return sentence(dict(self.details))


def recommend(
    data: Any,
    *,
    epsilon: float,
    num_steps: int,
    run_dir: str | Path = "runs",
    user: str | None = None,
    text: str | None = None,
    messages: str | None = None,
    users: int = 128,
    plan_only: bool = False,
    **settings: Unpack[MechanismSettings],
) -> Recommendation:
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    Without `plan_only` it looks at the data without protection; `non_private` says at what.

    Args:
      data, epsilon, num_steps, user, text, messages: as for `train`.
      run_dir: parent of the directories in the recommended settings.
      users: number of users whose gradients are measured.
      plan_only: read no text, and answer at once.
      settings: settings of `train`, except those that are recommended; output is quiet by default.

    Raises:
      ConfigError: a setting or the data are wrong; one line says how.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        for name in settings.keys() - OF_MECHANISM:
            raise unknown_setting(name, settings[name], OF_MECHANISM)
        given = {"epsilon": epsilon, "num_steps": num_steps, "run_dir": run_dir, **settings}
        privacy, run = configs_for(data, given, user, text, messages)
        set_threads(run.engine)
        from fedsim.tuning import recommend as advise  # imports JAX, which reads the threads

        found = advise(privacy, run, Console(), num_users=users, plan_only=plan_only)
    return Recommendation(
        found["recommended"],
        found["reason"],
        _advice(found["els"]),
        _advice(found["uls"]),
        tuple(found["non_private"]),
        found,
    )


def _advice(fields: dict[str, Any]) -> Advice:
    return Advice(**{**fields, "cells": [Cell(**cell) for cell in fields["cells"]]})


def audit(
    algorithm: str,
    data: Any,
    *,
    epsilon: float,
    num_steps: int,
    run_dir: str | Path | None = None,
    user: str | None = None,
    text: str | None = None,
    messages: str | None = None,
    gradient_canaries: int = 400,
    confidence: float = 0.95,
    **settings: Unpack[TrainSettings],
) -> AuditResult:
    """Attack a training: plant made-up users (canaries), train, and guess which took part.

    Args:
      algorithm, data, epsilon, num_steps, user, text, messages, settings: the training; as for
        `train`, but output is quiet by default.
      run_dir: directory of the audited run. Default: a new one in runs/.
      gradient_canaries: number of made-up users; see `AuditConfig`.
      confidence: of a refutation by guesses.

    Raises:
      ConfigError: a setting or the data are wrong; one line says how.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
        attack = AuditConfig(gradient_canaries, confidence)
        place = directory_of(run_dir, f"audit-{algorithm}", {})
        given = {"epsilon": epsilon, "num_steps": num_steps, "run_dir": place, **settings}
        privacy, run = configs_for(data, given, user, text, messages)
        set_threads(run.engine)
        from fedsim.trust import audit as attack_training

        console = Console()
        found = attack_training(Algorithm(algorithm), attack, privacy, run, console)
    names = ("delta", "confidence", "holds", "verdict", "verdicts")
    return AuditResult(
        run_dir=run.run_dir,
        epsilon=float(found["epsilon"]),
        details=found,
        **{name: found[name] for name in names},
    )
