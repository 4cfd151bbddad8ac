"""Does a run directory keep its promises? The ledger, replayed against everything else there is.

Each promise is looked at by itself and named where it is broken. Without the key, or the data, what
needs them is left out and said to be. What no file can show, that the noise was really added, is
shown by computing the last steps again from the key (`replay`): the parameters must be the same.
"""

import dataclasses
import functools
import math
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedsim import accounting, checkpoint, keys, ledger, metrics, rundir
from fedsim.accounting import StepEvent
from fedsim.config import Algorithm, ConfigError, FedsimError, PrivacyConfig, RunConfig, to_json
from fedsim.console import Console
from fedsim.data.dataset import Dataset
from fedsim.engine import EngineError
from fedsim.files import FileDamaged, read_json
from fedsim.keys import SecretKey
from fedsim.ledger import LedgerError
from fedsim.models import start
from fedsim.plan import ADJACENCY, Plan, method_for
from fedsim.train import train

EPSILON_TOLERANCE = 1e-9  # relative: of other versions of the packages that add up


class Violated(FedsimError):
    """A promise is not kept; the message says how."""


class Unknown(FedsimError):
    """What it takes to look at a promise is not there."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What was found about one promise."""

    promise: str
    holds: bool | None
    """None: it could not be looked at."""
    found: str

    @property
    def verdict(self) -> str:
        """For people."""
        return {True: "holds", False: "VIOLATED", None: "not looked at"}[self.holds]


@dataclasses.dataclass
class Evidence:
    """A run directory as its checks read it."""

    run_dir: Path
    stored: dict[str, Any]
    data: str | None
    """Where the data are now, if not where they were."""
    engine: str | None
    console: Console

    def __post_init__(self) -> None:
        if "plan" not in self.stored:
            raise ConfigError(f"run={self.run_dir}: expected a run of train, which makes promises")
        try:
            self.plan = Plan.from_dict(self.stored["plan"])
            self.privacy = privacy_of(self.stored)
            run: dict[str, Any] = {**self.stored["run"], "run_dir": self.run_dir, "resume": True}
            run |= {"data": self.data} if self.data else {}
            run |= {"engine": self.engine} if self.engine else {}
            self.run = RunConfig(**run)
        except (TypeError, KeyError, ValueError) as error:
            path = self.run_dir / rundir.CONFIG
            raise Violated(f"{path}: not the settings of a run ({error})") from None
        self._lines: list[dict[str, Any]] = []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The ledger's. Raises Unknown unless they have been found whole."""
        if not self._lines:
            raise Unknown("needs a ledger that is whole")
        return self._lines

    @lines.setter
    def lines(self, found: list[dict[str, Any]]) -> None:
        self._lines = found

    @property
    def num_steps(self) -> int:
        """Steps in the ledger."""
        return len(self.lines) - 1

    def key(self) -> SecretKey:
        """The run's. Raises Unknown if it was not handed on."""
        if not (self.run_dir / keys.FILE).exists():
            raise Unknown(f"there is no {keys.FILE}")
        return SecretKey.load(self.run_dir)

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The run's data. Raises Unknown if they cannot be read."""
        try:
            return start.load_data(self.run, start.find(self.run.model), self.console.note)
        except (FedsimError, OSError) as error:
            raise Unknown(f"the data cannot be read: {error}") from None


def verify(
    run_dir: Path,
    *,
    data: str | None = None,
    replay: bool = False,
    engine: str | None = None,
    console: Console,
) -> list[Check]:
    """Look at every promise of a run, in an order in which each relies on those before.

    Args:
      data: where the data are now; None: where they were when the run was started.
      replay: compute the steps since the last checkpoint but one again, and compare parameters.
      engine: where; None: as the run was started.
    Raises: ConfigError: `run_dir` is no run, or `data` cannot be read.
    """
    try:
        evidence = Evidence(run_dir, rundir.load(run_dir), data, engine, console)
    except (Violated, FileDamaged, LedgerError) as error:
        return [Check("settings", False, str(error))]
    if data is not None:
        try:
            _ = evidence.dataset
        except Unknown as error:
            raise ConfigError(f"data={data}: {error}") from None
    looks = [*LOOKS, *([("replay", _replay)] if replay else [])]
    return [_check(promise, look, evidence) for promise, look in looks]


def privacy_of(stored: dict[str, Any]) -> PrivacyConfig:
    """The settings that a run was started with."""
    return PrivacyConfig(**{**stored["privacy"], "epsilon": float(stored["privacy"]["epsilon"])})


def demanded_event(plan: Plan) -> StepEvent | None:
    """What a step of this plan is to the accountant; None without noise."""
    if not plan.noise_multiplier:
        return None
    cap = plan.group_size if plan.algorithm == Algorithm.ELS else 1
    return StepEvent(plan.noise_multiplier, plan.accounted_prob, cap)


def _check(promise: str, look: Callable[[Evidence], str], evidence: Evidence) -> Check:
    try:
        return Check(promise, True, look(evidence))
    except (Unknown, EngineError) as error:
        return Check(promise, None, str(error))
    except FedsimError as error:
        return Check(promise, False, str(error))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violated(message)


def _ledger(evidence: Evidence) -> str:
    """The chain is whole, and its head is of these settings."""
    path = evidence.run_dir / ledger.FILE
    lines = ledger.read(evidence.run_dir)
    _require(len(lines) > 0, f"{path}: expected a ledger, found nothing")
    head = lines[0]["head"]
    same = head.get("config_sha256") == rundir.config_sha256(evidence.run_dir)
    _require(same, f"{evidence.run_dir / rundir.CONFIG}: was changed since the run was started")
    _require(head.get("plan") == evidence.plan.as_dict(), f"{path}: the head has another plan")
    _require(head.get("adjacency") == ADJACENCY, f"{path}: the head has another adjacency")
    before = [each["epsilon"] for each in head.get("before", [])]
    demanded = [event.epsilon for event, _ in evidence.plan.before]
    _require(before == demanded, f"{path}: before={before}: expected {demanded}, as in the plan")
    evidence.lines = lines
    return f"{evidence.num_steps} steps, none missing, none twice; not a byte changed"


def _settings(evidence: Evidence) -> str:
    """The plan is what the settings ask for."""
    plan, privacy = evidence.plan, evidence.privacy
    asked = {
        "num_steps": (privacy.num_steps, plan.num_steps),
        "budget": (privacy.budget, plan.budget),
        "delta": (privacy.delta, plan.delta),
        "clip_norm": (privacy.clip_norm, plan.clip_norm),
        "clipping": (privacy.clipping, plan.clipping),
        "sampling": (privacy.sampling, plan.sampling_run),
        "group_size": (privacy.group_size, plan.group_size),
        "epsilon": (privacy.epsilon, plan.target_epsilon),
        "group_size_epsilon": (privacy.group_size_epsilon, plan.group_size_epsilon),
        "clip_quantile": (privacy.clip_quantile, plan.clip_quantile),
        "assumed_population": (privacy.assumed_population, plan.assumed_population),
    }
    for name, (wanted, planned) in asked.items():
        same = wanted is None or wanted == planned
        _require(same, f"{name}={planned} in the plan: expected {wanted}, as in the settings")
    share = plan.expected_count / plan.num_units
    _require(plan.sampling_prob == share, f"sampling_prob={plan.sampling_prob}: expected {share}")
    each = 1 if plan.algorithm == Algorithm.ELS else plan.group_size
    count = plan.budget // each
    _require(plan.expected_count == count, f"expected_count={plan.expected_count}: not {count}")
    return f"{plan.algorithm}, {plan.num_steps} steps, noise multiplier {plan.noise_multiplier:.6g}"


def _events(evidence: Evidence) -> str:
    """Every line is what the plan demands."""
    plan = evidence.plan
    event = demanded_event(plan)
    demanded = {
        "event": event and dataclasses.asdict(event),
        "sampling_run": plan.sampling_run,
        "sampling_accounted": plan.sampling_accounted,
    }
    path = evidence.run_dir / ledger.FILE
    for line in evidence.lines[1:]:
        for name, value in demanded.items():
            found = line.get(name)
            same = found == value
            _require(same, f"{path}: step {line['step']}: {name}={found}: expected {value}")
    most = f"{evidence.num_steps} steps: expected at most {plan.num_steps}"
    _require(evidence.num_steps <= plan.num_steps, f"{path}: {most}")
    if event is None:
        return "no noise in every step"
    return (
        f"in every step noise multiplier {event.noise_multiplier:.6g}, "
        f"sampling probability {event.sampling_prob:.6g}, "
        f"at most {event.max_contributions} drawn per person"
    )


def _epsilon(evidence: Evidence) -> str:
    """All steps together cost no more than was asked for."""
    plan = evidence.plan
    released = ledger.phases(evidence.lines)
    if released is None:
        _require(math.isinf(plan.target_epsilon), "steps without noise: epsilon is infinite")
        return "no noise: epsilon is infinite, as asked for"
    spent = accounting.epsilon(released, plan.delta)
    most = plan.target_epsilon * (1 + EPSILON_TOLERANCE)
    _require(spent <= most, f"epsilon={spent}: expected at most {plan.target_epsilon}")
    return f"{spent:.6g} at delta {plan.delta:.3g}, recomputed from the ledger's events"


def _checkpoints(evidence: Evidence) -> str:
    """Every checkpoint is as it was written, of a step that the ledger has."""
    kept = checkpoint.kept(evidence.run_dir)
    for path in kept:
        step = checkpoint.load_step(path)
        named = path.name == checkpoint.name(step)
        _require(named, f"{path}: holds step {step}")
        fits = step <= evidence.num_steps
        _require(fits, f"{path}: step {step}, and the ledger has {evidence.num_steps}")
    if not kept:
        raise Unknown("there is none yet")
    return f"{', '.join(path.name for path in kept)}: not a byte changed"


def _metrics(evidence: Evidence) -> str:
    """Nothing was shown of a step that the ledger does not have."""
    path = evidence.run_dir / metrics.FILE
    last = max((line["step"] for line in metrics.read(evidence.run_dir)), default=0)
    fits = last <= evidence.num_steps
    _require(fits, f"{path}: has step {last}, and the ledger {evidence.num_steps}")
    return f"up to step {last}"


def _summary(evidence: Evidence) -> str:
    """What was claimed is what follows from the ledger and the parameters."""
    path = evidence.run_dir / rundir.SUMMARY
    if not path.exists():
        raise Unknown("the run has not ended: nothing is claimed yet")
    claimed = read_json(path)
    for name, value in _claims(evidence):
        found = claimed.get(name)
        if isinstance(value, float) and isinstance(found, float):
            same = math.isclose(found, value, rel_tol=EPSILON_TOLERANCE)
        else:
            same = found == value
        _require(same, f"{path}: {name}={found}: expected {value}")
    return f"epsilon {claimed['epsilon']}, {claimed['steps_done']} steps, parameters"


def _claims(evidence: Evidence) -> Iterator[tuple[str, Any]]:
    plan = evidence.plan
    yield from ((n, v) for n, v in plan.as_dict().items() if n != "non_private")
    released = ledger.phases(evidence.lines)
    yield "adjacency", ADJACENCY
    yield "epsilon_holds", plan.epsilon_holds
    yield "steps_done", evidence.num_steps
    yield "ledger_chain", evidence.lines[-1]["chain"]
    yield "epsilon", to_json(ledger.epsilon_of(released, plan.delta))
    if (newest := checkpoint.latest(evidence.run_dir)) is not None:
        yield "params_sha256", checkpoint.params_sha256(checkpoint.load_params(newest))
        yield "steps_done", checkpoint.load_step(newest)


def _private(evidence: Evidence) -> str:
    """Key and directory are their owner's; the key is the one that the ledger was begun with."""
    key = evidence.key()
    for path, most in ((evidence.run_dir, 0o700), (evidence.run_dir / keys.FILE, 0o600)):
        mode = stat.S_IMODE(path.stat().st_mode)
        _require(not mode & ~most, f"{path}: mode {mode:o}: expected {most:o}")
    sealed = evidence.lines[0]["head"].get("key_seal") == key.seal("ledger")
    _require(sealed, f"{evidence.run_dir / keys.FILE}: another key than the ledger was begun with")
    return "the key is its owner's alone, and the ledger's"


def _data(evidence: Evidence) -> str:
    """The data are those that the run was started with."""
    key, users = evidence.key(), evidence.dataset.train
    same = key.seal(users.fingerprint) == evidence.plan.data_seal
    _require(same, f"data={evidence.run.data}: other data than the run was started with")
    found = (users.num_users, users.num_examples)
    planned = (evidence.plan.num_users, evidence.plan.num_examples)
    _require(found == planned, f"data={evidence.run.data}: {found} users, examples, not {planned}")
    return f"{users.num_users} users, {users.num_examples} examples, with the same fingerprint"


def _draws(evidence: Evidence) -> str:
    """The units that took part are those that the key draws."""
    key, users = evidence.key(), evidence.dataset.train
    privacy = dataclasses.replace(
        evidence.privacy, delta=evidence.plan.delta, group_size=evidence.plan.group_size
    )
    method = method_for(evidence.plan.algorithm, privacy, users, key)
    units = method.sampler.num_units
    _require(units == evidence.plan.num_units, f"num_units={evidence.plan.num_units}: not {units}")
    name, steps = "non_private/cohort_size", 0
    for line in metrics.read(evidence.run_dir):
        if name in line:
            drawn = len(method.draw(line["step"] - 1))
            message = (
                f"step {line['step'] - 1}: {line[name]} units took part, the key draws {drawn}"
            )
            _require(line[name] == drawn, message)
            steps += 1
    return f"the sizes of {steps} draws are those that the key gives"


def _replay(evidence: Evidence) -> str:
    """The last steps, computed again, give the same parameters."""
    evidence.key()
    _ = evidence.dataset
    older = checkpoint.kept(evidence.run_dir)
    newest = older.pop() if older else None
    if newest is None or checkpoint.load_step(newest) != evidence.plan.num_steps:
        raise Unknown("the run has not ended")
    with tempfile.TemporaryDirectory(prefix="fedsim-replay-") as scratch:
        copy = Path(scratch) / "run"
        (copy / checkpoint.DIRECTORY).mkdir(parents=True)
        for name in (rundir.CONFIG, rundir.TOKENIZER, keys.FILE, ledger.FILE):
            if (evidence.run_dir / name).exists():
                shutil.copyfile(evidence.run_dir / name, copy / name)
        for path in older:
            shutil.copy(path, copy / checkpoint.DIRECTORY)
        first = checkpoint.load_step(older[-1]) if older else 0
        run = dataclasses.replace(evidence.run, run_dir=copy)
        again = train(evidence.plan.algorithm, evidence.privacy, run, evidence.console)
    same = again["params_sha256"] == checkpoint.params_sha256(checkpoint.load_params(newest))
    _require(same, f"{newest}: steps {first} to {evidence.num_steps - 1} give other parameters")
    return f"steps {first} to {evidence.num_steps - 1}, computed again, give the same bits"


LOOKS: list[tuple[str, Callable[[Evidence], str]]] = [
    ("ledger", _ledger),
    ("settings", _settings),
    ("events", _events),
    ("epsilon", _epsilon),
    ("checkpoints", _checkpoints),
    ("metrics", _metrics),
    ("summary", _summary),
    ("key", _private),
    ("data", _data),
    ("draws", _draws),
]
