"""From the settings of a run to its summary (`train`), or to its plan and size (`dry_run`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedsim.config import Algorithm, PrivacyConfig, RunConfig
from fedsim.data import TEMPLATE
from fedsim.engine import versions
from fedsim.plan import in_words, warnings_of
from fedsim.run import SENDING, Console, StoredRun, directory
from fedsim.training.callbacks import Callback
from fedsim.training.open import AuditHooks, CustomTask, Purpose, open_run
from fedsim.training.optimizers import Noise, rate_of, update_rule, with_defaults
from fedsim.training.prepare import PreparedRun, prepare_run
from fedsim.training.trainer import Trainer

NOTHING_PROMISED = (
    "{}, so no privacy guarantee. The privacy budget of these users, in {}, will be infinite for "
    "ever, and no limit can be kept. For trials use a ledger of their own: budget_ledger=PATH"
)


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    purpose: Purpose = Purpose.TRAIN,
    custom: CustomTask | None = None,
    audit: AuditHooks | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, or resume training; return the contents of `summary.json`.

    Nothing is written to the run directory before all checks have passed.
    Args:
      custom: data and task, instead of those that the settings name.
      audit: canaries of an audit.
      callbacks: called between the steps.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    expect_runnable(privacy, run)
    if not purpose.is_counted:  # nobody else may learn how many trials there are
        here = [name for name in run.log_to if name not in SENDING]
        run = dataclasses.replace(run, log_to=here)
    hooks: dict[str, Any] = {"custom": custom, "audit": audit}
    with open_run(algorithm, privacy, run, console, purpose=purpose, **hooks) as opened:
        prepared = prepare_run(opened, callbacks=callbacks)
        show(prepared)
        return launch(prepared).fit()


def launch(prepared: PreparedRun) -> Trainer:
    """Write the run's directory if it is new, lock it, and return the Trainer of the run."""
    opened, plan = prepared.opened, prepared.plan
    if opened.stored is None:
        given = (opened.identity, opened.settings, opened.run, prepared.task.describe())
        stored = StoredRun(*given, versions=versions(), plan=plan, strategy=str(prepared.strategy))
        template = opened.data.path and opened.data.path / TEMPLATE
        template = template if template and template.is_file() else None
        files = (opened.data.tokenizer_path, opened.model and opened.model.files, template)
        created = directory.create(opened.run.run_dir, stored, opened.key, *files)
        opened.until_end.enter_context(created)
    return Trainer(prepared)


def show(prepared: PreparedRun) -> None:
    """Show the plan and what it warns of, before the first step."""
    opened, plan, console = prepared.opened, prepared.plan, prepared.opened.console
    if opened.stored is None:
        for warning in warnings_of(plan):
            console.warn(warning)
        if prepared.booking is not None and not plan.guarantee:
            request, _ = prepared.booking.requests[0]
            console.warn(NOTHING_PROMISED.format(in_words(plan.reasons), request.place))
    console.plan(plan, prepared.engine, opened.run)
    console.rows([("gradient method", str(prepared.strategy))])


def dry_run(
    algorithm: Algorithm, privacy: PrivacyConfig, run: RunConfig, console: Console
) -> dict[str, Any]:
    """Plan a run, with the engine `local`; nothing is trained, written or paid for. Returns the
    plan. Raises: ConfigError, EngineError: as in a training."""
    expect_runnable(privacy, run)
    with open_run(algorithm, privacy, run, console) as opened:
        prepared = prepare_run(opened, dry_run=True)
        show(prepared)
        return prepared.plan.as_dict()


def expect_runnable(privacy: PrivacyConfig, run: RunConfig) -> None:
    """Raise ConfigError if the optimizer does not exist."""
    settled = with_defaults(run, Noise(1.0, 1.0, 1))
    update_rule(settled, rate_of(settled, privacy.num_steps))
