"""Check the promises of a run: its ledger against all other files, the key and the data.

Each promise is a check of its own. Checks that need the key or the data report that they are
missing. What no file can show is computed again by `replay`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedsim import keys
from fedsim.accounting import at_most
from fedsim.clipping import Strategy
from fedsim.config import Algorithm
from fedsim.errors import DataError, FedsimError, FileDamaged, expect
from fedsim.files import read_json, sha256_of
from fedsim.keys import SecretKey
from fedsim.plan import (
    ALL_COVERED,
    Caveat,
    Fact,
    Plan,
    accounted_events,
    as_planned,
    claimed_fields,
    drawn_once,
    facts_of,
    method_for,
    private_group_size,
    sharing,
    voiding,
    with_group_size,
)
from fedsim.run import (
    Console,
    LedgerError,
    checkpoint,
    directory,
    find_model,
    ledger,
    metrics,
    private_part,
    results,
)
from fedsim.training import facts_of_start
from fedsim.trust.evidence import (
    ELSEWHERE,
    TOLERANCE,
    Check,
    Evidence,
    Unknown,
    Violated,
    check_constants,
    check_epsilon,
    check_evaluations,
    check_events,
    check_head,
    check_size,
    checked,
    counted,
    require,
)
from fedsim.trust.published import check_folder, is_folder, plan_in
from fedsim.trust.replay import replay

UNPROTECTED = (metrics.FILE, "progress.json", "tb/")
PLANNED = ("num_steps", "delta", "clip_norm", "adjacency", "clipping", "group_size")
PLANNED += ("group_size_epsilon", "clip_quantile", "loss_bound")
DRAWN = ("bands", "participations")  # settings of how units are drawn


def verify(
    run_dir: Path,
    *,
    data: str | None = None,
    again: str = "",
    engine: str | None = None,
    model: str | None = None,
    console: Console,
) -> list[Check]:
    """Check every promise of a run, or of a folder that `fedsim publish` made.

    Args:
      data: where the data are now; None: where they were at the start of the run.
      again: steps to compute again, to compare bits: "" none, "last" those since the last
        checkpoint but one, "whole" all, segment by segment.
      engine: where to compute them; None: as in the run.
      model: that the adapters of a published folder were trained on, to merge them again.
      console: shows the progress.

    Returns: A `Check` for each promise, in an order in which each uses findings of those before.

    Raises: ConfigError: `run_dir` is no run, or another process is working on it.
    """
    if is_folder(run_dir):
        expect("replay", again, not again, "the run's own directory: a published folder has no key")
        base = None if model is None else find_model(model, console, as_stored=True)
        expect("model", model, model is None or base is not None, "a pretrained model")
        return check_folder(run_dir, base)
    expect("model", model, model is None, "none for a run, whose model is known")
    try:
        with directory.lock(run_dir, to_read=True):
            evidence, looks = Evidence(run_dir, data, engine, console), list(CHECKS)
            if evidence.plan.evaluations is not None:
                looks.append(("evaluations", check_evaluations))
            if again:
                looks.append(("replay", functools.partial(replay, whole=again == "whole")))
            return [checked(promise, look, evidence) for promise, look in looks]
    except (Violated, FileDamaged, LedgerError) as error:
        return [Check("settings", False, str(error))]


def plan_of(run_dir: Path) -> Plan | None:
    """The plan of a run or of a published folder; None if it has none or cannot be read."""
    try:
        return plan_in(run_dir) if is_folder(run_dir) else directory.load(run_dir).plan
    except FedsimError:
        return None


def _ledger(evidence: Evidence) -> str:
    """The chain is intact, and its head has these settings."""
    path = evidence.run_dir / ledger.FILE
    lines = ledger.read(evidence.run_dir)
    require(len(lines) > 0, f"{path}: expected a ledger, found nothing")
    head = lines[0]["head"]
    same = head.get("config_sha256") == sha256_of(evidence.run_dir / directory.CONFIG)
    require(same, f"{evidence.run_dir / directory.CONFIG}: was changed since the run was started")
    planned = read_json(evidence.run_dir / directory.CONFIG)["plan"]  # as its version wrote it
    require(head.get("plan") == planned, f"{path}: the head has another plan")
    check_head(path, head, evidence.plan)
    evidence.lines = lines
    segments = len(ledger.segments_of(lines))
    parts = f" in {segments} segments, each with a nonce of its own" if segments > 1 else ""
    return f"{evidence.num_steps} steps, none missing, none twice{parts}; not a byte changed"


def _settings(evidence: Evidence) -> str:
    """The plan is as the settings demand."""
    plan, privacy = evidence.plan, evidence.privacy
    sampling, allocated = plan.sampling, plan.sampling.participations is not None
    compared = {name: (getattr(privacy, name), getattr(plan, name)) for name in PLANNED}
    compared |= {name: (getattr(privacy, name), getattr(sampling, name)) for name in DRAWN}
    compared |= {
        "batch_size": (None if allocated else privacy.batch_size, plan.batch_size),
        "sampling": (privacy.sampling_run, plan.sampling.kind),
        "noise": (privacy.noise, plan.noise.kind),
        "epsilon": (privacy.epsilon, plan.target_epsilon),
    }
    if (how := plan.evaluations) is not None or privacy.eval_epsilon is not None:
        compared["eval_epsilon"] = (privacy.eval_epsilon, how and how.epsilon)
    for name, (wanted, planned) in compared.items():
        same = wanted is None or wanted == planned
        require(same, f"{name}={planned} in the plan: expected {wanted}, as in the settings")
    Strategy.parse(str(evidence.stored.strategy))
    return check_constants(plan)


def _checkpoints(evidence: Evidence) -> str:
    """Every checkpoint is unchanged, of the ledger, and lacks only steps that segments lost."""
    kept, steps = checkpoint.kept(evidence.run_dir), ledger.steps_of(evidence.lines)
    segments = ledger.segments_of(evidence.lines)
    for path in kept:
        state = checkpoint.load(path)
        step, chain = int(state["step"]), str(state.get(checkpoint.CHAIN, ""))
        require(path == checkpoint.path_of(evidence.run_dir, step), f"{path}: holds step {step}")
        less = f"{evidence.run_dir / ledger.FILE} has {evidence.num_steps}"
        require(step <= evidence.num_steps, f"{path}: step {step}, and {less}")
        last = steps[step - 1] if step else evidence.lines[0]
        same = chain == last["chain"]
        require(same, f"{path}: is of another run: the ledger has another chain after step {step}")
        lost, stated = ledger.lost_steps(segments, step), int(state["lost_steps"])
        require(lost == stated, f"{path}: lost_steps={stated}: expected {lost}, by the segments")
        check_size(evidence.plan, state["params"], path)
    if not kept:
        where, path = (evidence.run_dir / x for x in (checkpoint.DIRECTORY, directory.SUMMARY))
        ended = path.exists() and read_json(path).get("steps_done") != 0
        require(not ended, f"{where}: expected the checkpoint of which the summary speaks")
        raise Unknown("there is none yet")
    return f"{', '.join(path.name for path in kept)}: not a byte changed"


def _metrics(evidence: Evidence) -> str:
    """Metrics are of steps in the ledger, and show no other epsilon."""
    path, name = evidence.run_dir / metrics.FILE, "privacy/epsilon"
    epsilons = [None, *(line.get("epsilon") for line in ledger.steps_of(evidence.lines))]
    lines = metrics.read(evidence.run_dir)
    last = max((line["step"] for line in lines), default=0)
    fits = last <= evidence.num_steps
    require(fits, f"{path}: has step {last}, and the ledger {evidence.num_steps}")
    for line in lines:
        step, shown = line["step"], line.get(name)
        same = shown in (None, epsilons[step])
        require(same, f"{path}: step {step}: {name}={shown}: not in {ledger.FILE}")
    steps = _of_steps(evidence, len({line["step"] for line in lines} - {0}))
    return f"{steps}; no digest covers {', '.join(UNPROTECTED)}: another number there may pass"


def _of_steps(evidence: Evidence, count: int) -> str:
    """The number of checked steps in words. Raises Unknown if there are none."""
    text = f"{count} of {evidence.num_steps} steps"
    if not count:
        raise Unknown(text)
    return text


def _summary(evidence: Evidence) -> str:
    """The summary follows from the ledger and the last checkpoint."""
    path = evidence.run_dir / directory.SUMMARY
    if (claimed := directory.summary_of(evidence.run_dir)) is None:
        raise Unknown("the run has not ended: nothing is claimed yet")
    for name, value in _claims(evidence):
        require(name in claimed, f"{path}: expected {name}")
        stated = claimed[name]
        if name == "outside":  # words may be those of another version: the values count
            stated, value = ([{**fact, "text": ""} for fact in each] for each in (stated, value))
        if name == "epsilon" and isinstance(value, float) and isinstance(stated, float):
            same = math.isclose(stated, value, rel_tol=TOLERANCE)
        else:
            same = stated == value
        require(same, f"{path}: {name}={stated}: expected {value}")
    steps, released = claimed["steps_done"], evidence.num_steps
    # Fewer, if a run was killed, resumed, and stopped before it had caught up.
    require(steps <= released, f"{path}: steps_done={steps}, and the ledger has {released}")
    epsilon = at_most(float(claimed["epsilon"]), ".6g")
    return f"epsilon {epsilon}, {steps} steps, losses and parameters agree"


def _claims(evidence: Evidence) -> Iterator[tuple[str, Any]]:
    """Fields of the summary: the claimed epsilon, and those of the last state."""
    plan, chain = evidence.plan, evidence.lines[-1]["chain"]
    claimed = accounted_events(plan, ledger.phases(evidence.lines))
    epsilon = ledger.epsilon_of(claimed, plan.delta)
    yield from claimed_fields(plan, epsilon, chain).items()
    if (newest := checkpoint.latest(evidence.run_dir)) is None:
        yield "steps_done", 0
        return
    state = checkpoint.load(newest)
    yield from results(state | private_part(evidence.run_dir, int(state["step"]))).items()


def _key(evidence: Evidence) -> str:
    """Key and directory are private to their owner, and the key belongs to the ledger."""
    path = evidence.run_dir / keys.FILE
    if not path.exists():
        raise Unknown(f"there is no {keys.FILE}")
    key = SecretKey.load(evidence.run_dir)
    sealed = evidence.lines[0]["head"].get("key_seal") == key.seal("ledger")
    require(sealed, f"{path}: {directory.ANOTHER_KEY}")
    seeded = key.seed is not None
    planned = f"seeded={evidence.plan.seeded} in the plan: expected {seeded}, as in {path}"
    require(seeded == evidence.plan.seeded, planned)
    evidence.key = key
    foreign = directory.of_others(evidence.run_dir)
    require(not foreign, f"{foreign}: expected your own files, and no links")
    for each, most in ((evidence.run_dir, 0o700), (path, 0o600)):
        mode = each.stat().st_mode & 0o777  # a directory may hand on its group
        require(not mode & ~most, f"{each}: mode {mode:o}: expected {most:o}")
    return f"{keys.FILE} is readable only by you and belongs to this ledger"


def _budget(evidence: Evidence) -> str:
    """The run is counted in the ledger of the data."""
    run = str(evidence.lines[0]["head"].get("key_seal"))
    plan, event = evidence.plan, evidence.event
    planned = None if event is None else [*plan.before, (event, plan.num_steps)]
    return counted(evidence.run_dir, run, plan.reasons, planned)


def _data(evidence: Evidence) -> str:
    """The data are unchanged since the run started; all bytes are hashed."""
    key, users = evidence.key, evidence.dataset.train
    held_out, how = evidence.dataset.eval_users, evidence.plan.evaluations
    try:
        for store in evidence.dataset.splits().values():
            store.check()
    except (DataError, OSError) as error:
        raise Violated(str(error)) from None
    if evidence.plan.purpose == "audit":
        raise Unknown("an audit's run: the users it made up beside those of the data are not kept")
    same = key.seal(users.fingerprint) == evidence.plan.data_seal
    source = evidence.run.data.source  # the recorded one may be relative to another directory
    where = f"data={Path(source).absolute() if Path(source).exists() else source}"
    require(same, f"{where}: other data than the run was started with{ELSEWHERE}")
    if how is not None:
        same = held_out is not None and key.seal(held_out.fingerprint) == how.seal
        require(same, f"{where}: other held-out users than at the start{ELSEWHERE}")
    counts = {"num_users": users.num_users, "num_examples": users.num_examples}
    for name, count in counts.items():
        if (planned := getattr(evidence.plan, name)) is not None:
            require(count == planned, f"{where}: {name}={count}: not {planned}")
    if (claimed := directory.summary_of(evidence.run_dir)) is not None:
        same = claimed.get("num_examples") == users.num_examples
        require(same, f"{where}: another num_examples than in {directory.SUMMARY}")
    evidence.users = users
    return f"{users.num_users:,} users, every byte of their texts as it was"


def _outside(evidence: Evidence) -> str:
    """Nothing is outside the guarantee but what the plan names: settings, key and data are read."""
    plan, privacy, users = evidence.plan, evidence.privacy, evidence.users
    found = voiding(privacy.epsilon, seeded=evidence.key.seed is not None)
    found += facts_of(privacy, evidence.dataset)
    found += facts_of_start(evidence.run, fresh_model=evidence.stored.identity.model is None)
    outside = [str(fact) for fact in found if fact not in (*plan.caveats, *plan.assumptions)]
    if (share := plan.group_size_epsilon) is not None:
        settings = dataclasses.replace(privacy, group_size_epsilon=share)  # as before the draw
        drawn = private_group_size(settings, users, evidence.key)
        same = plan.group_size == drawn
        require(same, f"group_size={plan.group_size}: the key draws {drawn} as the private median")
    elif plan.algorithm == Algorithm.ELS and privacy.group_size is None:
        default = with_group_size(plan.algorithm, privacy, users)
        other = default.group_size_epsilon is not None or default.group_size != plan.group_size
        if other and Caveat(Fact.GROUP_SIZE) not in plan.caveats:
            outside.append(f"group_size={plan.group_size}, which is neither private nor a default")
    require(not outside, f"{'; '.join(outside)}: expected {ALL_COVERED} but what the plan names")
    named = "; ".join(map(str, (*plan.caveats, *plan.assumptions)))
    return f"named in the plan: {named}" if named else ALL_COVERED


def _draws(evidence: Evidence) -> str:
    """The units that took part are those that key and segment draw."""
    plan, segments = evidence.plan, ledger.segments_of(evidence.lines)
    if plan.own_algorithm:
        raise Unknown(f"{plan.own_algorithm} draws, which is not part of fedsim")
    privacy, current = as_planned(evidence.privacy, plan), None
    method = method_for(plan.algorithm, privacy, evidence.users, evidence.key)
    shared = sharing(evidence.users, method)
    require(shared == plan.shared, f"shared={plan.shared}: the key draws {shared}")
    same = drawn_once(method, plan.num_steps, evidence.key) == plan.drawn_once
    require(same, "the key draws another pool, other groups or other turns")
    units = method.sampler.num_units
    require(units == plan.num_units, f"num_units={plan.num_units}: not {units}")
    name, count = "non_private/cohort_size", 0
    for line in metrics.read(evidence.run_dir):
        if name in line:
            step = line["step"] - 1
            if (segment := segments[ledger.number_of(segments, step)]) is not current:
                method.key, current = evidence.key.in_segment(segment.nonce, segment.first), segment
            drawn = len(method.draw(step))
            same = line[name] == drawn
            require(same, f"step {step}: {line[name]} units took part, the key draws {drawn}")
            count += 1
    steps = _of_steps(evidence, count)
    return f"how many were drawn in each step is what key and segment determine ({steps})"


CHECKS: list[tuple[str, Callable[[Evidence], str]]] = [
    ("ledger", _ledger),
    ("settings", _settings),
    ("events", check_events),
    ("epsilon", check_epsilon),
    ("checkpoints", _checkpoints),
    ("metrics", _metrics),
    ("summary", _summary),
    ("key", _key),
    ("budget", _budget),
    ("data", _data),
    ("outside", _outside),
    ("draws", _draws),
]
