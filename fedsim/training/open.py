"""Open a run: its directory, data, model, key and identity.

Checks come in the order of the time they take, and nothing is written before all have passed.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from fedsim import engine
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    as_dict,
    changed,
    original_names,
)
from fedsim.data import Dataset
from fedsim.engine import Engine, Task
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.models import Pretrained, frozen
from fedsim.noise import AddNoise
from fedsim.plan import Plan
from fedsim.run import (
    Console,
    Identity,
    StoredRun,
    directory,
    expect_same_model,
    find_model,
    load_data,
    make_task,
    model_sha256,
)


class Purpose(StrEnum):
    """Purpose of a run, which decides what is counted and who may see metrics."""

    TRAIN = "train"
    """A model to release."""
    AUDIT = "audit"
    """A training with planted canaries."""
    TRIAL = "trial"
    """A trial of a private selection, which the budget ledger counts in its place."""
    REPLAY = "replay"
    """The steps of a run once more, to compare their bits; nothing new is released."""

    @property
    def is_counted(self) -> bool:
        """True if the budget ledger counts the run, and others may see what it releases."""
        return self in (Purpose.TRAIN, Purpose.AUDIT)


class CustomTask(Protocol):
    """Data, task and first parameters of a run, in place of those that its settings name."""

    def data(self) -> Dataset:
        """The data to train on."""
        ...

    def start(self, data: Dataset, run: RunConfig, key: Any) -> tuple[Task, Any]:
        """The task and its initial parameters. Args: key: JAX key for new parameters."""
        ...


class AuditHooks(Protocol):
    """Canaries that an audit puts into a run, and its view of the run; see `trust.canaries`."""

    def data(self, data: Dataset) -> Dataset:
        """The data to train on."""
        ...

    def task(self, task: Task, params: Any) -> Task:
        """The task to train, from these parameters."""
        ...

    def record_noise(self, add_noise: AddNoise) -> AddNoise:
        """Wrap the function that adds noise, to record the sums before noise."""
        ...

    def on_release(
        self, gradient: Any, unit: float, coefficients: np.ndarray | None = None
    ) -> None:
        """See a step's privatised gradient. Args: unit: a contribution of one clip norm in it."""
        ...


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run with its data, key and identity."""

    purpose: Purpose
    settings: PrivacyConfig
    run: RunConfig
    data: Dataset
    model: Pretrained | None
    """The pretrained model to start from."""
    key: SecretKey
    identity: Identity
    stored: StoredRun | None
    """The run as it was started, if it is resumed."""
    console: Console
    custom: CustomTask | None
    audit: AuditHooks | None
    kind: type | None
    """Class of an algorithm of one's own."""
    until_end: ExitStack
    """Contexts that last until the run is closed."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of a run of `train`."""
        return Algorithm(self.identity.algorithm)

    @property
    def stored_plan(self) -> Plan | None:
        """The plan of a resumed run; None: the run is new."""
        return self.stored.plan if self.stored else None

    def start_engine(self) -> tuple[Engine, Task, Any]:
        """Start the workers.

        Returns: (engine, whose workers may still be starting; task; initial parameters).
        Raises: ConfigError: data and model do not fit, or there is no room for the workers.
        """
        engine.keep_compiled()
        fresh = SecretKey.create(self.key.seed or 0).jax_key("init")  # public, as theta^0 is
        if self.custom is not None:
            task, params = self.custom.start(self.data, self.run, fresh)
        else:
            task, params = make_task(self.run, self.model, self.data, fresh)
        if self.stored is not None:
            expect_same_model(self.stored, task.describe())
        if self.audit is not None:
            task = self.audit.task(task, params)
        workers = engine.create(self.run.engine, task, warn=self.console.warn)
        self.until_end.callback(workers.close)
        return workers, task, params


def class_name(kind: type | None) -> str:
    """module:class of an algorithm of one's own; empty for those of the paper."""
    return f"{kind.__module__}:{kind.__qualname__}" if kind else ""


@contextmanager
def open_run(
    algorithm: str,
    settings: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    purpose: Purpose = Purpose.TRAIN,
    custom: CustomTask | None = None,
    audit: AuditHooks | None = None,
    kind: type | None = None,
) -> Iterator[OpenRun]:
    """Find a run's data, model and key, and lock its directory if it exists, until the end.

    Args: see `train`.
    Raises: ConfigError: a mistake in the settings, or a resumed run would differ from its start.
      FileDamaged: what is there of the run, or its data, is not what it was.
    """
    stored, own = directory.find(run.run_dir, resume=run.resume), class_name(kind)
    if stored is not None and stored.plan is not None:
        was = stored.plan.own_algorithm
        again = f"{was or stored.identity.algorithm}, with which {run.run_dir} was started"
        expect("algorithm", own or algorithm, own == was, again)
    as_stored = run.model.lora_rank > 0
    model = None if custom else find_model(run.model.source, console, as_stored=as_stored)
    with ExitStack() as until_end:
        if stored:
            until_end.enter_context(directory.lock(run.run_dir))
        data = custom.data() if custom else load_data(run.data, model, console.note)
        for store in data.splits().values():
            store.check()  # before epsilon is spent on what a disk has damaged
        data = audit.data(data) if audit else data
        sha256 = model_sha256(model)
        if stored:
            key = directory.stored_key(run)
        else:
            weights = frozen.type_of(model.params) if model else "float32"
            context = key_context(own or algorithm, sha256, settings, run, data, weights)
            key = SecretKey.create(run.seed, context)
        identity = Identity(algorithm, sha256, key.seal(data.train.fingerprint))
        if stored:
            directory.expect_same(stored, StoredRun(identity, settings, run))
            run = dataclasses.replace(run, model=stored.run.model)  # which a person asked for
        # A strict run touches held-out users for a price, or not at all.
        if run.strict and settings.eval_epsilon is None:
            data = dataclasses.replace(data, eval_users=None)
        about = (settings, run, data, model, key, identity, stored, console, custom, audit)
        yield OpenRun(purpose, *about, kind, until_end)


def key_context(
    algorithm: str,
    model: str | None,
    settings: PrivacyConfig,
    run: RunConfig,
    data: Dataset,
    weights: str = "float32",
) -> str:
    """Everything that a key depends on beside the seed, so that no two different runs share a key.

    Settings at their defaults are left out, so that a new setting changes no earlier run. A
    pretrained model is identified by what is in it, as data are, wherever it lies.

    Args: weights: type of the model's matrices, if they stay as they are stored.
    """
    apart = OPERATIONAL | {"seed"} | ({"model"} if model is not None else set())
    of_run = {name: value for name, value in as_dict(run).items() if name not in apart}
    of_privacy = original_names(changed(PrivacyConfig, as_dict(settings)))
    of_run = original_names(changed(RunConfig, of_run))
    if rows := of_run.pop("rows_per_pass", None):  # earlier keys have both in one setting
        of_run["strategy"] = f"{run.engine.strategy}:{rows}"
    identity = {"algorithm": algorithm, "model": model}
    identity |= {"weights": weights} if weights != "float32" else {}
    facts = [identity, of_privacy, of_run, data.train.fingerprint]
    return json.dumps(facts, sort_keys=True)
