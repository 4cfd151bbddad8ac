"""What `verify` goes by: a run directory, what was found in it, and what is said of a promise."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedsim.budget.admission import expect_receipt
from fedsim.config import changed_run
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.errors import ConfigError, FedsimError
from fedsim.keys import SecretKey
from fedsim.run import directory
from fedsim.run.console import Console
from fedsim.run.model_source import find_model, load_data

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


class Found(Generic[T]):
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

    lines = Found[list[dict[str, Any]]]("a ledger that is whole")
    key = Found[SecretKey]("the run's own key")
    users = Found[UserStore]("the data that the run was started with")

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
