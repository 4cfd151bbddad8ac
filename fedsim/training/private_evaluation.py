"""Evaluation on held-out users with noise, while a run trains: they are users, too.

The mean loss per token of some texts of each user is cut off to [0, L]. The mean over users is
released with Gaussian noise: around L / 2, one user moves the sum by at most L / 2, and a user
without texts adds nothing (zero-out; the number of users is public). Each evaluation has its own
noise and is one more release in the budget ledger.

The evaluation after a step is released once, ever: its loss is written to `evaluations.jsonl`
before it is shown. A run that lost the parameters of a step to a crash does not evaluate that step
again.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.accounting import Event
from fedsim.budget import BudgetRequest, Entry, Limit, admitted
from fedsim.data import Dataset
from fedsim.engine import Engine
from fedsim.errors import FileDamaged
from fedsim.evaluate import VALIDATION
from fedsim.files import make_directory, open_to_append, whole_lines, write_durably
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.plan import Evaluations, Fact, Plan
from fedsim.run import Reached, ledger

FILE = "evaluations.jsonl"
"""Losses released while the run trains, one line each, never changed."""
DIRECTORY = "evaluations/training"
"""Folder of the receipt that held-out users were counted while the run trained."""
SPLIT = "eval_users"


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

    def add(self, step: int, loss: float) -> None:
        """Write the loss after a step, which is durable, and so released, when this returns."""
        self.losses[step] = loss
        with open_to_append(self._path) as file:
            write_durably(file, json.dumps({"step": step, "loss": loss}).encode() + b"\n")


def noisy_evaluate(
    workers: Engine,
    params: Any,
    data: Dataset,
    how: Evaluations,
    key: SecretKey,
    step: int,
    run_dir: Path,
    reached: Reached,
    *,
    again: bool = False,
) -> dict[str, float] | None:
    """Like `evaluate.evaluate`, for held-out users only and with the noise of the plan.

    Guarantees: each step's loss is released once, with its own noise. A user's loss is computed
      independently of all others, and moves the sum by at most L / 2 around L / 2.
    Args:
      key: of the run in its segment.
      reached: called with the number of released losses, before one is shown.
      again: if the loss after this step was released, it was for these parameters.
    Returns: losses by metric; None if that of the step was released for other parameters.
    """
    store, released = data.eval_users, Evaluated(run_dir)
    assert store is not None, "of a plan that has evaluations"
    if step in released.losses:
        return {VALIDATION[SPLIT]: released.losses[step]} if again else None
    rows = rows_of_users(store.offsets, how.num_users, how.rows)
    loss = noisy_mean_loss(
        workers.group_losses(params, SPLIT, rows),
        bound=how.loss_bound,
        count=how.num_users,
        stddev=how.noise_multiplier,
        rng=key.fresh.generator("held-out loss", step),
    )
    released.add(step, loss)
    reached(len(released.losses), "")
    return {VALIDATION[SPLIT]: loss}


@dataclasses.dataclass(frozen=True)
class Booking:
    """Entries of a run in the budget ledger: for its training users, and for its held-out users."""

    requests: list[tuple[BudgetRequest, Entry]]
    run_dir: Path
    evaluations: Evaluations | None

    @classmethod
    def of(
        cls, request: BudgetRequest, entry: Entry, plan: Plan, data: Dataset, key: SecretKey
    ) -> "Booking":
        """Make the entries of a run and of its evaluations. Args: key: the run's own."""
        requests, how = [(request, entry)], plan.evaluations
        if how is not None:
            assert data.eval_users is not None, "evaluations_of() comes first"
            limit = request.limit and Limit(request.limit.epsilon, how.delta)
            held_out = dataclasses.replace(
                request,
                ids=data.eval_users.user_ids(),
                kind="evaluation",
                limit=limit,
                run_dir=request.run_dir / DIRECTORY,
            )
            label = Fact.KNOWN_SEED if plan.seeded else ""
            planned: list[tuple[Event, int]] = [*how.phases(how.count)]
            entry = held_out.entry(key.seal("evaluation"), planned, how.slack, label)
            requests.append((held_out, entry))
        return cls(requests, request.run_dir, how)

    @contextmanager
    def admitted(self) -> Iterator[tuple[Reached, Reached]]:
        """Count the run, and its releases when the block ends; see `admission`. Yields: what is
        called with the lines of the run's own ledger, and with the number of evaluations."""
        (request, entry), *held_out = self.requests
        with ExitStack() as stack:
            of_run = stack.enter_context(admitted(request, entry))
            of_evaluations = ledger.unnoted
            for request, entry in held_out:
                make_directory(request.run_dir, 0o700)
                of_evaluations = stack.enter_context(admitted(request, entry, self._evaluated))
            yield of_run, of_evaluations

    def _evaluated(self) -> list[tuple[Event, int]]:
        """Events released of held-out users so far."""
        assert self.evaluations is not None, "of a run with evaluations"
        return [*self.evaluations.phases(len(Evaluated(self.run_dir).losses))]


def rows_of_users(offsets: np.ndarray, num_users: int, limit: int) -> list[np.ndarray]:
    """Example indices of users who have texts; users are evenly spaced, and so are a user's texts.

    Args:
      offsets: the store's, int64 [users + 1].
      num_users: number of users, of whom those without texts are left out.
      limit: largest number of texts of each user.
    """
    users = np.linspace(0, len(offsets) - 2, num_users).astype(np.int64)
    groups = []
    for low, high in zip(offsets[users], offsets[users + 1], strict=True):
        count = min(limit, int(high - low))
        groups.append(np.linspace(low, high - 1, count).astype(np.int64))
    return [rows for rows in groups if len(rows)]
