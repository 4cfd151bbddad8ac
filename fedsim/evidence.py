"""What `verify` goes by: a run directory, what was found in it, and what is said of a promise."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedsim import rundir
from fedsim.config import ConfigError, FedsimError, PrivacyConfig, RunConfig
from fedsim.console import Console
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.keys import SecretKey
from fedsim.models import start
from fedsim.plan import Plan

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
    """By a signal."""

    @property
    def verdict(self) -> str:
        """For people."""
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

        Raises: ConfigError, Violated, FileDamaged, LedgerError: there are no settings to go by.
        """
        self.run_dir, self.console = run_dir, console
        self.stored = rundir.load(run_dir)
        if "plan" not in self.stored:
            raise ConfigError(f"run={run_dir}: expected a run of train, which makes promises")
        try:
            self.plan = Plan.from_dict(self.stored["plan"])
            self.privacy = privacy_of(self.stored)
            run: dict[str, Any] = {**self.stored["run"], "run_dir": self.run_dir, "resume": True}
            run |= {"data": data} if data else {}
            run |= {"engine": engine} if engine else {}
            self.run = RunConfig(**run)
        except (TypeError, KeyError, ValueError) as error:
            path = self.run_dir / rundir.CONFIG
            raise Violated(f"{path}: not the settings of a run ({error})") from None

    @property
    def num_steps(self) -> int:
        """Steps in the ledger."""
        return len(self.lines) - 1

    @functools.cached_property
    def dataset(self) -> Dataset:
        """What lies where the run's data should be.

        Raises: Violated: something that cannot be read. Unknown: nothing, or there is no model.
        """
        there = Path(self.run.data).exists()
        try:
            model = start.find(self.run.model)
        except (FedsimError, OSError) as error:
            raise Unknown(f"the model cannot be read: {error}") from None
        try:
            return start.load_data(self.run, model, self.console.note)
        except (FedsimError, OSError) as error:
            found = f"the data cannot be read: {error}"
            raise (Violated if there else Unknown)(found) from None


def privacy_of(stored: dict[str, Any]) -> PrivacyConfig:
    """The settings that a run was started with."""
    return PrivacyConfig(**{**stored["privacy"], "epsilon": float(stored["privacy"]["epsilon"])})


def require(holds: bool, message: str) -> None:
    """Raises Violated with the message unless `holds`."""
    if not holds:
        raise Violated(message)
