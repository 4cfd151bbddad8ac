"""Evaluation on held-out users with noise, while a run trains: they are users, too.

The mean loss per token of some texts of each user is cut off to [0, L]. The mean over users is
released with Gaussian noise: around L / 2, one user moves the sum by at most L / 2, and a user
without texts adds nothing (zero-out; the number of users is public). Each evaluation has its own
noise and is one more release in the budget ledger.

A run that is resumed after a crash evaluates some steps again. If their parameters had other bits
(another host, other packages), a second loss under the same noise would reveal the difference of
the two losses. So a loss is written to `evaluations.jsonl` before it is shown, and never computed
twice.
"""

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedsim.accounting import Event, StepEvent
from fedsim.budget import Applicant, Entry, Limit, admitted, ledger_after
from fedsim.config import ZERO_OUT, EngineConfig, RunConfig, default_delta
from fedsim.data import Dataset, UserStore
from fedsim.engine import Engine, create
from fedsim.errors import ConfigError, FileDamaged, expect, expect_positive
from fedsim.evaluate import VALIDATION
from fedsim.files import make_directory, open_to_append, whole_lines, write_durably, write_json
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.plan import (
    ADJACENCY,
    MOST_ROWS,
    REPRODUCTION,
    Evaluations,
    Plan,
    noise_of,
    rows_of_users,
)
from fedsim.run import note
from fedsim.sampling import graph_of

FILE = "evaluations.jsonl"
"""Losses released while the run trains, one line each, never changed."""
AFTERWARDS, RESULT = "evaluations", "evaluation.json"
"""Folder in the run's directory for evaluations after the training, and the result's file there."""
DIRECTORY = f"{AFTERWARDS}/training"
"""Folder of the receipt that held-out users were counted while the run trained."""
SPLIT = "eval_users"
WITH_TEXTS = "num_users, of those with a text in this split (taken as public)"
"""The number of users of another split depends on how much the training users wrote."""


class Evaluated:
    """Released evaluations of a run, by step."""

    def __init__(self, run_dir: Path):
        """Raises: FileDamaged."""
        self._path = run_dir / FILE
        self.losses: dict[int, float] = {}
        for line in whole_lines(self._path):
            step, loss = line.get("step"), line.get("loss")
            if not isinstance(step, int) or not isinstance(loss, float) or step in self.losses:
                raise FileDamaged(f"{self._path}: expected a step, once, and its loss in each line")
            self.losses[step] = loss

    def release(self, step: int, compute: Callable[[], float]) -> float:
        """The loss after `step`: the released one, or a new one, written to disk first."""
        if step not in self.losses:
            loss = compute()
            with open_to_append(self._path) as file:
                write_durably(file, json.dumps({"step": step, "loss": loss}).encode() + b"\n")
            self.losses[step] = loss
        return self.losses[step]


def begin_noisy_evaluate(
    workers: Engine,
    params: Any,
    data: Dataset,
    how: Evaluations,
    key: SecretKey,
    step: int,
    run_dir: Path,
) -> Callable[[], dict[str, float]]:
    """Like `evaluate.begin_evaluate`, for held-out users only and with the noise of the plan.

    Guarantees: each step's loss is released once, with its own noise. A user's loss is computed
      independently of all others, and moves the sum by at most L / 2 around L / 2.
    """
    store, released = data.eval_users, Evaluated(run_dir)
    assert store is not None, "of a plan that has evaluations"
    if step in released.losses:
        return lambda: {VALIDATION[SPLIT]: released.losses[step]}
    wait = workers.begin_group_losses(params, SPLIT, how.groups(store.offsets))

    def compute() -> float:
        return noisy_mean_loss(
            wait(),
            bound=how.loss_bound,
            count=how.num_users,
            stddev=how.noise_multiplier,
            rng=key.generator("held-out loss", step),
        )

    def release() -> dict[str, float]:
        loss = released.release(step, compute)
        note(run_dir / DIRECTORY, len(released.losses), "")
        return {VALIDATION[SPLIT]: loss}

    return release


@dataclasses.dataclass(frozen=True)
class Counted:
    """Entries of a run in the budget ledger: for its training users, and for its held-out users."""

    applicants: list[tuple[Applicant, Entry]]
    run_dir: Path
    evaluations: Evaluations | None

    @classmethod
    def of(
        cls, applicant: Applicant, entry: Entry, plan: Plan, data: Dataset, key: SecretKey
    ) -> "Counted":
        """Make the entries of a run and of its evaluations. Args: key: the run's own."""
        applicants, how = [(applicant, entry)], plan.evaluations
        if how is not None:
            assert data.eval_users is not None, "evaluations_of() comes first"
            limit = applicant.limit and Limit(applicant.limit.epsilon, how.delta)
            held_out = dataclasses.replace(
                applicant,
                ids=data.eval_users.user_ids(),
                kind="evaluation",
                limit=limit,
                run_dir=applicant.run_dir / DIRECTORY,
                delta=None,
                spend_rest=None,
            )
            label = REPRODUCTION if plan.seeded else ""
            phases: list[tuple[Event, int]] = [*how.phases(how.count)]
            entry = held_out.entry(key.seal("evaluation"), phases, how.slack, label)
            applicants.append((held_out, entry))
        return cls(applicants, applicant.run_dir, how)

    def expect_room(self) -> None:
        """Raise ConfigError if a limit of one of these users would be broken."""
        for applicant, entry in self.applicants:
            applicant.expect_room(entry)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count the run, and its releases when the block ends; see `admission`."""
        with ExitStack() as stack:
            for applicant, entry in self.applicants:
                of_evaluations = applicant.kind == "evaluation"
                if of_evaluations:
                    make_directory(applicant.run_dir, 0o700)
                released = self._evaluated if of_evaluations else None
                stack.enter_context(admitted(applicant, entry, released))
            yield

    def _evaluated(self) -> list[tuple[Event, int]]:
        """Events released of held-out users so far."""
        assert self.evaluations is not None
        return [*self.evaluations.phases(len(Evaluated(self.run_dir).losses))]


@dataclasses.dataclass(frozen=True)
class PrivateEvaluation:
    """Settings of one evaluation with noise after the training."""

    epsilon: float
    """Cost for each user of the split. > 0."""
    delta: float | None = None
    """delta of this epsilon. In (0, 1). Default: as in training, for the
    users of the split."""
    split: Literal["eval_users", "eval_examples", "test"] = "eval_users"
    loss_bound: float | None = None
    """L: bound at which losses are cut off, in nats per token. > 0. Default: the loss of a uniform
    guess."""
    budget_ledger: str | Path | None = None
    """Directory of the ledger that counts it. Default: the one that counts the run."""

    def __post_init__(self):
        expect("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "> 0 and finite")
        expect("delta", self.delta, self.delta is None or 0 < self.delta < 1, "in (0, 1)")
        expect_positive(self, "loss_bound")


class LossRelease(NamedTuple):
    """One loss that is to be released with noise, and its entry in the budget ledger."""

    store: UserStore
    """The split that it is of."""
    delta: float
    sigma: float
    loss_bound: float
    key: SecretKey
    applicant: Applicant
    entry: Entry

    @classmethod
    def of(cls, data: Dataset, run: RunConfig, how: PrivateEvaluation) -> "LossRelease":
        """Plan a release, which costs nothing yet.

        Raises: ConfigError: the split does not exist, or a limit would be broken.
        """
        store: UserStore | None = getattr(data, how.split)
        if store is None:
            raise ConfigError.of("split", how.split, "a split that the data have")
        expect("split", how.split, store.num_users > 1, "a split with two users at least")
        expect("split", how.split, graph_of(store) is None, "texts with one owner each")
        delta = default_delta(store.num_users) if how.delta is None else how.delta
        sigma, part = noise_of(how.epsilon, delta, setting="epsilon")
        most = how.loss_bound or largest_loss(store.vocab_size)
        key, out = SecretKey.create(), (run.run_dir / AFTERWARDS / secrets.token_hex(4)).absolute()
        limit = None if run.limit_epsilon is None else Limit(run.limit_epsilon, delta)
        ids, place = store.user_ids(), ledger_after(run, how.budget_ledger)
        if how.split != SPLIT:  # who has a text there depends on what they wrote, and is not public
            ids = sorted({*data.train.user_ids(), *ids})
        applicant = Applicant(place, ids, "evaluation", limit, out, delta)
        entry = applicant.entry(key.seal("evaluation"), [(StepEvent(sigma, 1.0), 1)], part, "")
        applicant.expect_room(entry)
        return cls(store, delta, sigma, most, key, applicant, entry)


def release_loss(
    task: Any,
    params: Any,
    data: Dataset,
    run: RunConfig,
    how: PrivateEvaluation,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Release the mean loss of a model on one split with noise, counted in the budget ledger.

    Args:
      task: of the model, with the split to evaluate on.
      params: of the model. What they cost the users of the split is in the ledger, too.
      data: of the run.
      run: with the limit.
      about: first fields of the result.
    Raises: ConfigError: the split does not exist, or a limit would be broken.
    """
    store, delta, sigma, most, key, applicant, entry = LossRelease.of(data, run, how)
    out = applicant.run_dir
    make_directory(out, 0o700)
    with admitted(applicant, entry):
        losses = user_losses(task, params, how.split)
        rng = key.generator("evaluation")
        loss = noisy_mean_loss(losses, bound=most, count=store.num_users, stddev=sigma, rng=rng)
        result = {
            **about,
            "split": how.split,
            "loss": loss,
            "loss_unit": data.loss_unit,
            "stddev": sigma * most / 2 / store.num_users,
            "loss_bound": most,
            "epsilon": how.epsilon,
            "delta": delta,
            "noise_multiplier": sigma,
            "num_users": store.num_users,
            "adjacency": ADJACENCY[ZERO_OUT],
            **({} if how.split == "eval_users" else {"non_private": [WITH_TEXTS]}),
        }
        write_json(out / RESULT, result)
    return {**result, "written_to": str(out / RESULT)}


def user_losses(task: Any, params: Any, split: str) -> np.ndarray:
    """Mean loss of each user of a split who has texts, in nats per token, float64 [such users].

    Guarantees: a user's loss is a function of the parameters and of that user's texts alone; see
      `Engine.begin_group_losses`.
    """
    offsets = getattr(task.dataset, split).offsets
    rows = rows_of_users(offsets, len(offsets) - 1, MOST_ROWS)
    return create(EngineConfig("local"), task).begin_group_losses(params, split, rows)()


def largest_loss(vocab_size: int) -> float:
    """L: loss of a uniform guess, in nats per token."""
    return math.log(vocab_size)
