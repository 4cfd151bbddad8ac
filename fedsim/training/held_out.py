"""Held-out loss with noise while a run trains, counted for those whose texts it is of."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedsim.accounting import Event
from fedsim.budget.admission import Applicant
from fedsim.budget.ledger import Entry, Limit
from fedsim.data.dataset import Dataset
from fedsim.engine import Engine
from fedsim.evaluate import VALIDATION
from fedsim.files import make_directory
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.plan import REPRODUCTION, Evaluations, Plan
from fedsim.run.evaluations import Evaluated
from fedsim.run.ledger import note

DIRECTORY = "evaluations/training"
"""Of the receipt that held-out users were counted, in the run's directory."""
SPLIT = "eval_users"


def begin_noisy_evaluate(
    workers: Engine,
    params: Any,
    data: Dataset,
    how: Evaluations,
    key: SecretKey,
    step: int,
    run_dir: Path,
) -> Callable[[], dict[str, float]]:
    """Like `evaluate.begin_evaluate`, for held-out users alone and with the noise of the plan.

    Guarantees: each step's loss is released once, with noise of its own. A user's loss is computed
      beside nobody else's, and moves the sum by at most L / 2, around which it counts.
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
    """A run in the ledger of the data: for those it trains on, and for those it is evaluated on."""

    applicants: list[tuple[Applicant, Entry]]
    run_dir: Path
    evaluations: Evaluations | None

    @classmethod
    def of(
        cls, applicant: Applicant, entry: Entry, plan: Plan, data: Dataset, key: SecretKey
    ) -> "Counted":
        """The run that applies, with its evaluations. Args: key: the run's own."""
        found, how = [(applicant, entry)], plan.evaluations
        if how is not None:
            assert data.eval_users is not None, "evaluations_of() comes first"
            limit = applicant.limit and Limit(applicant.limit.epsilon, how.delta)
            own = dataclasses.replace(
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
            found.append((own, own.entry(key.seal("evaluation"), phases, how.slack, label)))
        return cls(found, applicant.run_dir, how)

    def expect_room(self) -> None:
        """Raises ConfigError: a limit of one of these users would be broken."""
        for applicant, entry in self.applicants:
            applicant.expect_room(entry)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count the run, and when the block ends what it released; see `Applicant.admitted`."""
        with ExitStack() as stack:
            for applicant, entry in self.applicants:
                of_evaluations = applicant.kind == "evaluation"
                if of_evaluations:
                    make_directory(applicant.run_dir, 0o700)
                seen = self._evaluated if of_evaluations else None
                stack.enter_context(applicant.admitted(entry, seen))
            yield

    def _evaluated(self) -> list[tuple[Event, int]]:
        """What was released of held-out users."""
        assert self.evaluations is not None
        return [*self.evaluations.phases(len(Evaluated(self.run_dir).losses))]
