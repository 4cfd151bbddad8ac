"""Held-out loss with noise: held-out users are users, too.

Of each user the mean loss per token of some of their texts counts, cut to [0, L]. The mean over
users is released with Gaussian noise: around L / 2, one user moves the sum by L / 2 at most, where
a user without texts adds nothing (zero-out; the number of users is public). Each evaluation has
noise of its own from the operating system, and is one more release in the ledger of the data.
"""

import dataclasses
import math
import secrets
from typing import Any, Literal

import jax
import numpy as np

from fedsim.accounting import StepEvent
from fedsim.budget.admission import Applicant
from fedsim.budget.ledger import Limit, place_of
from fedsim.config import ZERO_OUT, RunConfig
from fedsim.data.users import UserStore
from fedsim.errors import ConfigError, expect
from fedsim.evaluate import last_model
from fedsim.files import make_directory, write_json
from fedsim.keys import SecretKey
from fedsim.noise import noisy_mean_loss
from fedsim.plan import ADJACENCY, noise_of
from fedsim.plan.evaluations import MOST_ROWS
from fedsim.run.console import Console
from fedsim.run.directory import StoredRun
from fedsim.sampling import graph_of

DIRECTORY, RESULT = "evaluations", "evaluation.json"
WITH_TEXTS = "num_users, of those with a text in this split (taken as public)"
"""How many of the training users these are depends on how much they wrote."""


@dataclasses.dataclass(frozen=True)
class PrivateEvaluation:
    """What is evaluated with noise, and what that may cost."""

    epsilon: float
    """What it costs every user of the split. > 0."""
    delta: float | None = None
    """At which. Default: N^-1.1 for the split's N users."""
    split: Literal["eval_users", "eval_examples", "test"] = "eval_users"
    loss_bound: float | None = None
    """L: losses above count as it, in nats per token. > 0. Default: that of guessing uniformly."""

    def __post_init__(self):
        expect("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "> 0 and finite")
        expect("delta", self.delta, self.delta is None or 0 < self.delta < 1, "in (0, 1)")
        bound = self.loss_bound
        expect("loss_bound", bound, bound is None or 0 < bound < math.inf, "> 0 and finite")


def evaluate_privately(
    stored: StoredRun, run: RunConfig, how: PrivateEvaluation, console: Console
) -> dict[str, Any]:
    """Loss of a run's last checkpoint on one split, with noise, counted in the ledger of the data.

    Repeated, it is another release with other noise, and counted again. The result and its receipt
    are kept in the run's directory, in evaluations/.
    Raises: ConfigError: as `last_model`, there is no such split, or a limit would be broken.
    """
    task, params, data, path = last_model(stored, run, console)
    store: UserStore | None = getattr(data, how.split)
    if store is None:
        raise ConfigError(f"split={how.split}: expected a split that the data have")
    expect("split", how.split, store.num_users > 1, "a split with two users at least")
    expect("split", how.split, graph_of(store) is None, "texts with one owner each")
    delta = store.num_users**-1.1 if how.delta is None else how.delta
    sigma, part = noise_of(how.epsilon, delta)
    most = how.loss_bound or largest_loss(store.vocab_size)
    key, out = SecretKey.create(), (run.run_dir / DIRECTORY / secrets.token_hex(4)).absolute()
    limit = None if run.limit_epsilon is None else Limit(run.limit_epsilon, delta)
    ids, place = store.user_ids(), place_of(run.budget_ledger)
    applicant = Applicant(place, ids, "evaluation", limit, out, delta)
    entry = applicant.entry(key.seal("evaluation"), [(StepEvent(sigma, 1.0), 1)], part, "")
    applicant.expect_room(entry)
    make_directory(out, 0o700)
    with applicant.admitted(entry):
        losses = user_losses(task, params, how.split)
        rng = key.generator("evaluation")
        known = {"bound": most, "count": store.num_users, "stddev": sigma}
        found = noisy_mean_loss(losses, **known, rng=rng)
        result = {
            **{"run_dir": str(run.run_dir), "checkpoint": path.name, "split": how.split},
            **{"loss": found, "stddev": sigma * most / 2 / store.num_users, "loss_bound": most},
            **{"epsilon": how.epsilon, "delta": delta, "noise_multiplier": sigma},
            **{"num_users": store.num_users, "adjacency": ADJACENCY[ZERO_OUT]},
            **({} if how.split == "eval_users" else {"non_private": [WITH_TEXTS]}),
        }
        write_json(out / RESULT, result)
    return {**result, "written_to": str(out / RESULT)}


def user_losses(task: Any, params: Any, split: str) -> np.ndarray:
    """Mean loss of each user of a split who has texts, in nats per token, float64 [such users].

    Guarantees: a user's is a function of the parameters and of that user's texts alone: nobody
      else's are computed beside them, and the sums are exact.
    """
    store: UserStore = getattr(task.dataset, split)
    frozen = () if task.frozen is None else (task.frozen,)
    compute = jax.jit(task.nats)
    found = []
    for low, high in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        if low == high:
            continue
        count = min(MOST_ROWS, int(high - low))
        rows = np.linspace(low, high - 1, count).astype(np.int64)
        padded = np.pad(rows, (0, MOST_ROWS - count), constant_values=-1)
        nats, tokens = compute(params, task.read(split, padded), *frozen)
        total = np.asarray(nats, np.float64)[:count]
        mean = math.fsum(total) if np.isfinite(total).all() else math.nan
        found.append(mean / max(1, int(np.asarray(tokens)[:count].sum())))
    return np.array(found, np.float64)


def largest_loss(vocab_size: int) -> float:
    """L: the loss of guessing uniformly, in nats per token."""
    return math.log(vocab_size)
