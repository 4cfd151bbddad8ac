"""Train a run again without some people: exact forgetting, from before they were first drawn.

The run's key tells in which step one of them was drawn first. What the run was before that step is
what it would have been without them (docs/theory/forget.md), so the new run starts from the newest
checkpoint of that time. From there on it has fresh keys: with the old noise, the difference of the
two models would be the gradient of the people who are gone.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most
from fedsim.budget import RUNNING, Applicant, Charge, books, look
from fedsim.config import ZERO_OUT, DataConfig, changed_run, to_json
from fedsim.data import Dataset
from fedsim.els import ELS
from fedsim.errors import GOES_ON, ConfigError, FedsimError, expect
from fedsim.keys import SecretKey
from fedsim.plan import (
    GIVEN,
    PUBLIC,
    Plan,
    PoissonSampling,
    Release,
    as_planned,
    drawn_once,
    method_for,
)
from fedsim.run import (
    Console,
    Parent,
    StoredRun,
    begin_from,
    checkpoint,
    directory,
    ledger,
    parent_of,
)
from fedsim.sampling import POOL
from fedsim.training import OWN_TASK, train
from fedsim.uls import ULS


class Stopped(FedsimError):
    """A signal stopped the new run before its last step."""

    exit_code = 75  # EX_TEMPFAIL


@dataclasses.dataclass(frozen=True)
class Retraining:
    """A run that is to be trained again without some people, and its new directory."""

    old: StoredRun
    key: SecretKey
    """Key of the old run."""
    out: Path
    first: int | None
    """First released step, from 0, that drew a text of theirs; None: no step did."""
    parent: Parent
    why: str
    """Reason why no step is saved; empty if some are."""

    @property
    def plan(self) -> Plan:
        """The plan, which both runs share but for what is sealed with their keys."""
        assert self.old.plan is not None, "of a run of train"
        return self.old.plan

    @property
    def run(self) -> str:
        """The name of the old run."""
        return self.old.run.run_dir.resolve().name

    @property
    def num_steps(self) -> int:
        """Number of steps to compute."""
        return 0 if self.first is None else self.plan.num_steps - self.parent.step

    @property
    def constants(self) -> list[str]:
        """What both runs have that was computed from the people's texts."""
        plan = self.plan
        facts = [fact for fact in plan.non_private if not fact.startswith((GIVEN, PUBLIC))]
        if plan.group_size_epsilon is not None:
            facts.append(f"group_size={plan.group_size}, chosen with noise from all texts")
        return facts

    @property
    def computed(self) -> list[str]:
        """What is told of the people's texts and draws."""
        if self.first is None:
            return [*self.constants, "that no step drew them follows from their draws"]
        step = f"its first step, {self.parent.step}, " if self.parent.step else "its being there "
        return [*self.constants, f"{step}follows from when they were drawn"]


def first_drawn(method: ELS | ULS, num_steps: int, theirs: np.ndarray) -> int | None:
    """The first step, from 0, that draws a text of some people; None if there is none.

    Args:
      theirs: True for their texts, bool [texts].
    """
    for step in range(num_steps):
        rows = method.draw(step)
        if theirs[rows[rows >= 0]].any():
            return step
    return None


def retraining_of(run_dir: Path, out: Path, data: Dataset, people: Collection[str]) -> Retraining:
    """Find where a run has to be trained again for people to be forgotten.

    Args:
      out: directory of the new run; it may have the beginning of it.
      data: those of the run, with the people's texts.
      people: their ids.

    Raises:
      ConfigError: it is no run on these data, or none that can be trained again in parts; or `out`
        is something else.
      CheckpointError, LedgerError: the run was changed.
    """
    old = directory.find(run_dir, resume=True)
    expect("retrain", run_dir, old is not None, f"the directory of a run, with {directory.CONFIG}")
    assert old is not None
    _expect_can(old, data)
    plan, key = old.plan, directory.stored_key(old.run)
    assert plan is not None, "a run of train has one"
    with directory.lock(run_dir, to_read=True):
        method = method_for(plan.algorithm, as_planned(old.privacy, plan), data.train, key)
        is_gone = np.isin(data.train.user_ids(), [*people])
        theirs = np.repeat(is_gone, np.diff(data.train.offsets))
        released = len(ledger.read(run_dir)) - 1
        first, path, why = first_drawn(method, released, theirs), None, _why_none(old)
        if first is not None and not why:
            early = [each for each in checkpoint.kept(run_dir) if _step(each) <= first]
            path = max(early, default=None)
            why = "" if path else "it has no checkpoint of so early a step"
        if why and old.parent is not None and old.parent.step:
            first = 0
        retraining = Retraining(old, key, out, first, parent_of(run_dir, path), why)
    if out.exists() or out.is_symlink():
        begun = directory.find(out, resume=True)
        same = begun is not None and begun.parent == retraining.parent
        expect("run_dir", out, same, "a directory that is not there yet")
    return retraining


def _step(path: Path) -> int:
    """The number of steps in the name of a checkpoint."""
    return int(path.stem.rpartition("-")[2])


def _why_none(old: StoredRun) -> str:
    """The reason why no checkpoint of a run can be kept; empty if one can be."""
    plan = old.plan
    assert plan is not None, "a run of train has one"
    if old.parent is not None and old.parent.step:
        return "its first steps are another run's, whose draws its key does not know"
    if plan.noise.bands > 1:
        return "its noise is correlated: later steps take back noise of earlier ones"
    if not isinstance(plan.sampling, PoissonSampling):
        return f"with {plan.sampling.kind} sampling, steps of a user depend on each other"
    return ""


def _expect_can(old: StoredRun, data: Dataset) -> None:
    """Raise ConfigError if a run is not on these data, or cannot be trained again in parts."""
    run_dir, plan = old.run.run_dir, old.plan
    if plan is None:
        raise ConfigError.of("retrain", run_dir, "a run of train")
    key = SecretKey.load(run_dir)
    same = key.seal(data.train.fingerprint) == old.identity.data_seal
    released = bool(ledger.head(run_dir))
    afresh = "; train another run on the new data"
    required = {
        f"a run on data={data.path}": same,
        "a run that has released something": released,
        "a run without a seed, by which others know its noise": key.seed is None,
        "a run for release, not an audit or a trial": isinstance(plan.purpose, Release),
        "a run of the command line, not of a task in code": OWN_TASK not in plan.non_private,
        f"texts with one owner each{afresh}": plan.shared is None,
        f"{ZERO_OUT} adjacency, where places stay{afresh}": plan.adjacency == ZERO_OUT,
        f"a run without eval_epsilon{afresh}": plan.evaluations is None,
    }
    for expected, holds in required.items():
        expect("retrain", run_dir, holds, expected)


def cost(retraining: Retraining, others: Collection[str], place: Path) -> dict[str, Any]:
    """What a retraining saves, computes, and costs everyone else.

    Args:
      others: ids of all users but the people.
      place: directory of the ledger of the data.

    Raises:
      ConfigError: it would break a limit of the ledger, or the ledger does not count the old run.
    """
    plan, steps, out = retraining.plan, retraining.num_steps, retraining.out
    run = SecretKey.load(out).seal("ledger") if out.exists() else ""
    events, slack = plan.events_from(plan.num_steps - steps), plan.slack_after(steps)
    applicant = Applicant(place, [*others], "train", None, out, plan.delta)
    entry = applicant.entry(run, events, slack, plan.label)
    with look(place) as account:
        counts = f"the ledger of the data that counts {retraining.run}"
        expect("budget_ledger", place, retraining.parent.run in account.entries, counts)
        if steps:
            applicant.expect_room_in(account, entry)
        spent, told = books(account, applicant.ids), not account.hides_users
        apart = [charge for charge in spent.charges if charge.entry.run != run]
        spent = dataclasses.replace(spent, charges=apart)
        numbered = dataclasses.replace(entry, number=account.num_lines + 1)
        more = Charge(numbered, events, RUNNING) if steps else None
        before, after = spent.total(plan.delta), spent.total(plan.delta, more=more)
    own = accounting.epsilon(events, plan.delta) if plan.guarantee and events else math.inf
    return {
        "steps_saved": retraining.parent.step if steps else plan.num_steps,
        "steps": steps,
        "gradients": plan.budget * steps,
        "epsilon_before": to_json(before.fixed) if told else None,
        "epsilon": to_json(own if steps else 0.0),
        "epsilon_after": to_json(after.fixed) if told else None,
        "delta": plan.delta,
    }


def sentence(
    retraining: Retraining, spent: dict[str, Any], unnamed: Callable[[str], str] = str
) -> str:
    """What a retraining saves and costs, in words.

    Args:
      spent: the result of `cost`.
      unnamed: takes the people's ids out of a name.
    """
    run, total = unnamed(retraining.run), retraining.plan.num_steps
    if retraining.first is None:
        but = "; ".join(map(unnamed, retraining.constants))
        return (
            f"{run}: no step drew any of them: its model is as if they had never been there"
            f"{f', but for what was computed from their texts: {but}' if but else ''}"
        )
    step, why = retraining.parent.step, retraining.why
    delta = at_most(spent["delta"], ".2e")
    own, together = at_most(float(spent["epsilon"]), ".4g"), ""
    if spent["epsilon_before"] is not None:
        before, after = (
            at_most(float(spent[f"epsilon_{when}"]), ".4g") for when in ("before", "after")
        )
        together = f"all runs together cost epsilon = {before} before, and {after} after them; "
    return (
        f"{run}: trained again from step {step}{f' ({why})' if why else ''}: {step:,} of {total:,} "
        f"steps are saved, {spent['steps']:,} computed, with about {spent['gradients']:,} "
        f"gradients; for everyone else {together}these steps alone cost epsilon = {own}, at "
        f"delta = {delta}"
    )


def described(retraining: Retraining, model: str, unnamed: Callable[[str], str]) -> dict[str, Any]:
    """The new run for the certificate.

    Args:
      model: sha256 of its parameters.
      unnamed: takes the people's ids out of a name.
    """
    names = {"run": unnamed(retraining.out.name), "old_run": unnamed(retraining.run)}
    return {**names, "first_step": retraining.parent.step, "model": model}


def retrain(
    retraining: Retraining,
    data: Path,
    lasting: Path,
    place: Path,
    engine: str | None,
    console: Console,
) -> str:
    """Train a run again on data without the people, or resume that; return the model's sha256.

    Args:
      data: the data without them.
      lasting: where these data will be.
      place: directory of the ledger of the data.
      engine: where to compute; None: as the old run.

    Raises:
      Stopped: a signal came.
      ConfigError, LedgerError, EngineError: as in a training.
    """
    out = retraining.out
    if not out.exists():
        begin_from(retraining.old.run.run_dir, out, *_begun(retraining, data, lasting, place))
    stored = directory.load(out)
    run = changed_run(
        dataclasses.replace(stored.run, data=DataConfig(str(data))),
        engine=engine or stored.run.engine.kind,
        resume=True,
    )
    summary = train(retraining.plan.algorithm, stored.privacy, run, console)
    if summary["steps_done"] < summary["num_steps"]:
        raise Stopped(f"run_dir={out}: stopped after step {summary['steps_done']}; {GOES_ON}")
    return summary["params_sha256"]


def _begun(
    retraining: Retraining, data: Path, lasting: Path, place: Path
) -> tuple[StoredRun, SecretKey]:
    """The new run as it is started, and its fresh key, which keeps the pool of ELS alone."""
    old, plan, key = retraining.old, retraining.plan, retraining.key.renewed(POOL)
    train_data = Dataset.open(data).train
    sealed = key.seal(train_data.fingerprint)
    method = method_for(plan.algorithm, as_planned(old.privacy, plan), train_data, key)
    again = {"drawn_once": drawn_once(method, plan.num_steps, key), "data_seal": sealed}
    run = changed_run(
        dataclasses.replace(old.run, data=DataConfig(str(lasting))),
        run_dir=retraining.out,
        budget_ledger=place,
        limit_epsilon=None,
        spend_rest=False,
    )
    stored = dataclasses.replace(
        old,
        identity=dataclasses.replace(old.identity, data_seal=sealed),
        run=run,
        plan=dataclasses.replace(plan, **again),
        parent=retraining.parent,
    )
    return stored, key
