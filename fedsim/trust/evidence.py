"""Evidence for the checks of `verify`: a run's directory, and findings that checks share.

Checks of a ledger against the plan in its head need neither key, data nor settings.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsim import accounting
from fedsim.accounting import RunningEpsilon, StepEvent, at_most, event_fields
from fedsim.budget import Released, expect_receipt
from fedsim.clipping import num_coordinates
from fedsim.config import Algorithm, changed_run
from fedsim.data import Dataset, UserStore
from fedsim.engine import EngineError
from fedsim.errors import ConfigError, FedsimError
from fedsim.evaluate import VALIDATION
from fedsim.keys import SecretKey
from fedsim.plan import Fact, Plan, accounted_events, step_event
from fedsim.run import Console, directory, find_model, ledger, load_data, metrics
from fedsim.training import DIRECTORY, FILE, SPLIT, Evaluated

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading a file that somebody else wrote."""
TOLERANCE = 1e-9  # relative: other versions of packages may round differently
RUNNING_TOLERANCE = 10 * accounting.RELATIVE_ACCURACY  # grids depend on the step

ELSEWHERE = (
    "; if they are elsewhere now, the setting data says where (a relative path starts at the "
    "current directory)"
)


class Violated(FedsimError):
    """A promise is broken; the message says how."""


class Unknown(FedsimError):
    """A promise cannot be checked, because something for it is missing."""


class Interrupted(Unknown):
    """A signal stopped the check."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of checking one promise."""

    promise: str
    holds: bool | None
    """None: it could not be checked."""
    found: str
    """The finding in words."""
    interrupted: bool = False
    """True if a signal stopped the check."""

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        return {True: "OK", False: "VIOLATED", None: "not checked"}[self.holds]


NEEDED = {
    "lines": "a ledger that is whole",
    "key": "the run's own key",
    "users": "the data that the run was started with",
}
"""Attributes of a record that one check sets and later checks use."""


class Record:
    """A ledger and the plan in it, for checks that need nothing else."""

    lines: list[dict[str, Any]]

    def __init__(self, run_dir: Path, plan: Plan):
        """Args:
        run_dir: the directory with the ledger.
        """
        self.run_dir, self.plan = run_dir, plan

    def __getattr__(self, name: str) -> Any:
        raise Unknown(f"needs {NEEDED[name]}") if name in NEEDED else AttributeError(name)

    @property
    def num_steps(self) -> int:
        """Number of steps in the ledger."""
        return len(ledger.steps_of(self.lines))

    @property
    def event(self) -> StepEvent | None:
        """A step's event; None without noise. Raises Unknown: only a step in the ledger has it."""
        event = step_event(self.plan, ledger.phases(self.lines))
        if event is None and self.plan.noise_multiplier:
            raise Unknown("no step is released, which has the event of its algorithm")
        return event


class Evidence(Record):
    """A run's directory, for its checks."""

    key: SecretKey
    users: UserStore

    def __init__(self, run_dir: Path, data: str | None, engine: str | None, console: Console):
        """Load the settings of the run.

        Args:
          data: where the data are now; None: as recorded.
          engine: where to compute; None: as recorded.

        Raises:
          ConfigError: there is no run of train.
          FileDamaged, LedgerError: the settings or the ledger's head were changed.
        """
        self.console, self.stored = console, (stored := directory.load(run_dir))
        if stored.plan is None:
            raise ConfigError.of("run", run_dir, "a run of train, which makes promises")
        super().__init__(run_dir, stored.plan)
        self.privacy = stored.privacy
        changes = {"data": data, "engine": engine}
        changes = {name: value for name, value in changes.items() if value}
        self.run = changed_run(stored.run, resume=True, **changes)

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The data at the recorded or given place.

        Raises:
          Violated: they cannot be read.
          Unknown: they, or the model whose tokens they are, are missing.
        """
        try:
            model = find_model(self.run.model.source)
        except (FedsimError, OSError) as error:
            raise Unknown(f"the model cannot be read: {error}") from None
        try:
            return load_data(self.run.data, model, self.console.note)
        except (FedsimError, OSError) as error:
            kind = Violated if Path(self.run.data.source).exists() else Unknown
            raise kind(f"the data cannot be read: {error}{ELSEWHERE}") from None


def checked(promise: str, look: Callable[[Any], str], evidence: Record) -> Check:
    """The result of a check.

    Args: look: returns the finding in words; raises Unknown, Violated or another FedsimError.
    """
    try:
        return Check(promise, True, look(evidence))
    except (Unknown, EngineError, OSError) as error:
        return Check(promise, None, str(error), isinstance(error, Interrupted))
    except FedsimError as error:
        return Check(promise, False, str(error))
    except MALFORMED as error:
        what = f"a file has another content than fedsim writes ({type(error).__name__}: {error})"
        return Check(promise, False, what)


def counted(run_dir: Path, run: str, label: str, planned: Released) -> str:
    """The finding that the ledger of the data counts a run; see `expect_receipt`.

    Raises: Unknown: there is no receipt, or the ledger is not on this machine.
    """
    is_counted, message = expect_receipt(run_dir, run, label, planned)
    if not is_counted:
        raise Unknown(message)
    return message


def require(holds: bool, message: str) -> None:
    """Raise Violated with the message unless `holds`."""
    if not holds:
        raise Violated(message)


def check_evaluations(evidence: Evidence) -> str:
    """Check that evaluations cost at most what was planned, and that no other loss was shown.

    Returns: The finding in words.

    Raises:
      Violated: they cost more, or another loss was shown.
      Unknown: the key or the ledger of the data is missing.
    """
    how, path = evidence.plan.evaluations, evidence.run_dir / FILE
    assert how is not None, "of a plan that has them"
    spent = accounting.epsilon(how.phases(how.count), how.delta - how.slack[1]) + how.slack[0]
    paid = spent <= how.epsilon * (1 + TOLERANCE)
    require(paid, f"evaluations of epsilon {spent}: expected at most {how.epsilon}")
    losses = Evaluated(evidence.run_dir).losses
    last = evidence.plan.num_steps
    for step in losses:
        due = step <= evidence.num_steps and (step % how.every == 0 or step == last)
        require(due, f"{path}: step {step}: expected none but each {how.every}th and the last")
    for line in metrics.read(evidence.run_dir):
        others = {name for split, name in VALIDATION.items() if split != SPLIT} & line.keys()
        require(not others, f"{metrics.FILE}: step {line['step']}: {min(others, default='')}")
        shown = line.get(VALIDATION[SPLIT])
        same = shown is None or shown == losses.get(line["step"])
        require(same, f"{metrics.FILE}: step {line['step']}: {shown}, which {FILE} does not have")
    run = evidence.key.seal("evaluation")
    label = Fact.KNOWN_SEED if evidence.plan.seeded else ""
    planned: Released = [*how.phases(how.count)]
    message = counted(evidence.run_dir / DIRECTORY, run, label, planned)
    return f"{len(losses)} of {how.count}, epsilon {at_most(how.epsilon, '.4g')}; {message}"


def check_head(path: Path, head: dict[str, Any], plan: Plan) -> None:
    """The adjacency follows from the plan. Args: path: of the ledger, for errors."""
    require(head.get("adjacency") == plan.compared, f"{path}: the head has another adjacency")


def check_constants(plan: Plan) -> str:
    """The constants of a plan follow from each other."""
    sampling = plan.sampling
    share = plan.expected_count / plan.num_units
    if sampling.participations is not None:
        # Participations decide; count and budget follow, rounded.
        share = 1 / (plan.num_steps // sampling.participations)
    require(sampling.prob == share, f"sampling_prob={sampling.prob}: expected {share}")
    each = 1 if plan.algorithm == Algorithm.ELS else plan.group_size
    count = plan.batch_size // each
    require(plan.expected_count == count, f"expected_count={plan.expected_count}: not {count}")
    units, most = plan.num_units, plan.num_users * plan.group_size // each  # more would be rarer
    require(units <= most or bool(plan.own_algorithm), f"num_units={units}: expected <= {most}")
    bands = plan.noise.bands
    require(bands in (1, sampling.bands), f"noise of {bands} bands: not {sampling.bands}")
    noise = f"noise multiplier {at_most(plan.noise_multiplier, '.6g')}"
    return f"{plan.algorithm}, {plan.num_steps} steps, {noise}"


def check_size(plan: Plan, params: Any, where: Path) -> None:
    """The parameters are as many as the plan says, from which the slack of the noise follows."""
    count, planned = num_coordinates(params), plan.num_parameters
    require(count == planned, f"{where}: has {count:,} numbers: expected {planned:,}, as planned")


def check_events(evidence: Record) -> str:
    """Every line is as the plan demands."""
    plan = evidence.plan
    event = evidence.event
    demanded = {
        "event": event and event_fields(event),
        "sampling_run": plan.sampling.kind,
        "sampling_accounted": plan.sampling.kind,
    }
    path = evidence.run_dir / ledger.FILE
    for line in ledger.steps_of(evidence.lines):
        for name, value in demanded.items():
            noted = line.get(name)
            same = noted == value
            require(same, f"{path}: step {line['step']}: {name}={noted}: expected {value}")
    most = f"{evidence.num_steps} steps: expected at most {plan.num_steps}"
    require(evidence.num_steps <= plan.num_steps, f"{path}: {most}")
    return "sampling and noise of every step are as planned"


def check_epsilon(evidence: Record) -> str:
    """All planned steps together cost no more than the target epsilon, and so do those so far."""
    plan, event = evidence.plan, evidence.event
    path, steps = evidence.run_dir / ledger.FILE, ledger.steps_of(evidence.lines)
    shown = [(step, line.get("epsilon")) for step, line in enumerate(steps, 1)]
    shown = [(step, epsilon) for step, epsilon in shown if epsilon is not None]
    claimed = accounted_events(plan, ledger.phases(evidence.lines))
    if claimed is None or event is None:
        require(math.isinf(plan.target_epsilon), "steps without noise: epsilon is infinite")
        require(not shown, f"{path}: expected no epsilon of steps without noise")
        return "no noise: epsilon is infinite, as asked for"
    spent = accounting.epsilon(claimed, plan.delta)
    most = plan.target_epsilon * (1 + TOLERANCE)
    require(spent <= most, f"epsilon={spent}: expected at most {plan.target_epsilon}")
    running = RunningEpsilon(event, plan.delta, plan.before)
    for step, epsilon in shown:
        fault = f"{path}: epsilon={epsilon} after step {step}: expected"
        require(isinstance(epsilon, int | float), f"{fault} a number")
        again = running(step)
        require(math.isclose(epsilon, again, rel_tol=RUNNING_TOLERANCE), f"{fault} {again}")
    epsilon, delta = at_most(spent, ".6g"), at_most(plan.delta, ".2e")
    return f"{epsilon} at delta {delta}, recomputed from the ledger's events"
