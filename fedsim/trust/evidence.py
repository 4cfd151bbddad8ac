"""What `verify` uses: a run directory, what was found in it, and what is said of a promise.

Counts all owners of all texts, unlike `sampling.shared`, which drew the pool and the groups.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most
from fedsim.budget import expect_receipt
from fedsim.config import changed_run
from fedsim.data import Dataset, Owners, UserStore
from fedsim.errors import ConfigError, FedsimError
from fedsim.evaluate import VALIDATION
from fedsim.keys import SecretKey
from fedsim.plan import REPRODUCTION
from fedsim.run import Console, directory, find_model, load_data, metrics
from fedsim.sampling import Groups
from fedsim.training import DIRECTORY, FILE, SPLIT, Evaluated

T = TypeVar("T")


class Violated(FedsimError):
    """A promise is not kept; the message says how."""


class Unknown(FedsimError):
    """What it takes to look at a promise is not there."""


class Interrupted(Unknown):
    """A signal came first."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What was found about one promise."""

    promise: str
    holds: bool | None
    """None: it could not be looked at."""
    found: str
    interrupted: bool = False
    """Whether a signal ended the look."""

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        return {True: "holds", False: "VIOLATED", None: "not looked at"}[self.holds]


class Finding(Generic[T]):
    """What one look finds and those after it rely on; Unknown until then."""

    def __init__(self, what: str):
        self.what = what

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, holder: Any, kind: type | None = None) -> T:
        if self.name not in vars(holder):
            raise Unknown(f"needs {self.what}")
        return vars(holder)[self.name]

    def __set__(self, holder: Any, value: T) -> None:
        vars(holder)[self.name] = value


class Evidence:
    """A run directory as its checks read it."""

    lines = Finding[list[dict[str, Any]]]("a ledger that is whole")
    key = Finding[SecretKey]("the run's own key")
    users = Finding[UserStore]("the data that the run was started with")

    def __init__(self, run_dir: Path, data: str | None, engine: str | None, console: Console):
        """Args: data, engine: where the data are now, and where to compute; None: as recorded.

        Raises: ConfigError, FileDamaged, LedgerError: there are no settings to go by.
        """
        self.run_dir, self.console = run_dir, console
        self.stored = stored = directory.load(run_dir)
        if stored.plan is None:
            raise ConfigError.of("run", run_dir, "a run of train, which makes promises")
        self.plan, self.privacy = stored.plan, stored.privacy
        changes = {"data": data, "engine": engine}
        changes = {name: value for name, value in changes.items() if value}
        self.run = changed_run(stored.run, resume=True, **changes)

    @property
    def num_steps(self) -> int:
        """Steps in the ledger."""
        return len(self.lines) - 1

    @functools.cached_property
    def dataset(self) -> Dataset:
        """What lies where the run's data should be.

        Raises: Violated: something that cannot be read. Unknown: nothing, or there is no model.
        """
        there = Path(self.run.data.source).exists()
        try:
            model = find_model(self.run.model.source)
        except (FedsimError, OSError) as error:
            raise Unknown(f"the model cannot be read: {error}") from None
        try:
            return load_data(self.run.data, model, self.console.note)
        except (FedsimError, OSError) as error:
            found = f"the data cannot be read: {error}"
            raise (Violated if there else Unknown)(found) from None


def counted(run_dir: Path, run: str, label: str) -> str:
    """What the ledger of the data says of a run; see `expect_receipt`.

    Raises: Unknown: there is no receipt, or the ledger is not here.
    """
    here, found = expect_receipt(run_dir, run, label)
    if not here:
        raise Unknown(found)
    return found


def demand(holds: bool, message: str) -> None:
    """Raises Violated with the message unless `holds`."""
    if not holds:
        raise Violated(message)


def most_owned(rows: np.ndarray, offsets: np.ndarray, owners: Owners) -> int:
    """Largest number of texts among `rows` that one user owns.

    Raises Violated: a text occurs twice.
    """
    demand(len(np.unique(rows)) == len(rows), "a text is in the pool twice")
    sets = np.searchsorted(offsets, rows, side="right") - 1
    return int(owners.count(np.bincount(sets, minlength=owners.num_sets)).max())


def most_entered(groups: Groups, offsets: np.ndarray, owners: Owners) -> int:
    """Largest number of other users' groups that contain texts of one user.

    Raises Violated: a text is in two groups, a user has two groups, or a group has a text that its
      user does not own.
    """
    demand(len(np.unique(groups.rows)) == len(groups.rows), "a text is in two groups")
    demand(len(np.unique(groups.users)) == groups.num_users, "a user has two groups")
    group = np.repeat(np.arange(groups.num_users), np.diff(groups.offsets))
    sets = np.searchsorted(offsets, groups.rows, side="right") - 1
    group, sets = np.divmod(np.unique(group * owners.num_sets + sets), owners.num_sets)
    counts = owners.sizes[sets]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    user = owners.users[np.repeat(owners.starts[sets], counts) + within]
    group = np.repeat(group, counts)
    own = user == groups.users[group]
    demand(int(own.sum()) == len(sets), "a group has a text that its user does not own")
    pairs = np.unique(user[~own].astype(np.int64) * groups.num_users + group[~own])
    entered = np.bincount(pairs // groups.num_users, minlength=1)
    return int(entered.max())


TOLERANCE = 1e-9  # relative: of other versions of the packages that add up


def check_evaluations(evidence: Evidence) -> str:
    """Check that evaluations cost at most what was planned, and that no other loss was shown.

    Returns: the finding in words. Raises: Violated, Unknown.
    """
    how, path = evidence.plan.evaluations, evidence.run_dir / FILE
    assert how is not None, "of a plan that has them"
    spent = accounting.epsilon(how.phases(how.count), how.delta - how.slack[1]) + how.slack[0]
    paid = spent <= how.epsilon * (1 + TOLERANCE)
    demand(paid, f"evaluations of epsilon {spent}: expected at most {how.epsilon}")
    losses = Evaluated(evidence.run_dir).losses
    last = evidence.plan.num_steps
    for step in losses:
        due = step <= evidence.num_steps and (step % how.every == 0 or step == last)
        demand(due, f"{path}: step {step}: expected none but each {how.every}th and the last")
    for line in metrics.read(evidence.run_dir):
        others = {name for split, name in VALIDATION.items() if split != SPLIT} & line.keys()
        demand(not others, f"{metrics.FILE}: step {line['step']}: {min(others, default='')}")
        shown = line.get(VALIDATION[SPLIT])
        same = shown is None or shown == losses.get(line["step"])
        demand(same, f"{metrics.FILE}: step {line['step']}: {shown}, which {FILE} does not have")
    run = evidence.key.seal("evaluation")
    label = REPRODUCTION if evidence.plan.seeded else ""
    found = counted(evidence.run_dir / DIRECTORY, run, label)
    return f"{len(losses)} of {how.count}, epsilon {at_most(how.epsilon, '.4g')}; {found}"
