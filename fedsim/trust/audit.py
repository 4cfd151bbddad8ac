"""Audit of a training: attacks that give an empirical lower bound on epsilon.

The training is the user's own command, with canaries among its users, each included by the toss of
a coin (`canaries`, `bounds`); the attacker sees every privatised gradient. A bound above the
claimed epsilon refutes the claim, with the stated confidence. A bound below it proves nothing,
because attacks only get better. There is also the membership attack of Kandpal et al. 2023 on real
users, by how much the training raises the likelihood of their texts.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from fedsim import accounting
from fedsim.accounting import Phases
from fedsim.config import Algorithm, AuditConfig, PrivacyConfig, RunConfig, changed_run
from fedsim.data import Dataset
from fedsim.engine import read_rows
from fedsim.errors import expect
from fedsim.files import write_json
from fedsim.installation import expect_installed
from fedsim.keys import SecretKey
from fedsim.models import LanguageModelTask
from fedsim.plan import ADJACENCY, REPRODUCTION, claimed_phases
from fedsim.run import Console, checkpoint, directory, find_model, ledger, load_data
from fedsim.sampling import examples_per_user, graph_of, median_group_size
from fedsim.training import train
from fedsim.trust import bounds
from fedsim.trust.bounds import Claim, audit_curve, audit_independent, curve_claim
from fedsim.trust.canaries import (
    POOLS,
    Planted,
    PlantedAmongOthers,
    coins,
    partners_of,
    rows_of_users,
)
from fedsim.trust.noise_audit import audit_noise
from fedsim.trust.pages import Chart, Series, write

NAME = "audit"
ROWS_AT_ONCE = 16
MOST_ROWS = 8  # texts of an attacked user
ALARMS = 0.01
CURVE_POINTS = 400
SHARP = 0.01
"""Share of a bound's error probability for each of the two tests with more assumptions than
guessing; they find mistakes with as little."""
PREMISE = "if each gradient canary tells of its own coin alone"
KINDS = {
    "gradient": "gradient canaries",
    "text": "text canaries",
    "membership": "real users, trained on and held out",
}
OF_PRIVACY = {"group_size", "group_size_epsilon"}  # settings of PrivacyConfig that are replaced
OF_SUMMARY = ("epsilon", "epsilon_holds", "delta", "noise_multiplier", "sampling_run")
OF_SUMMARY += ("sampling_prob", "num_steps", "steps_done", "planted")


def audit(
    algorithm: Algorithm,
    settings: AuditConfig,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
) -> dict[str, Any]:
    """Train with canaries, attack, and write audit.json, .html and .md into the run's directory.

    Args:
      algorithm, privacy, run: the training that is audited.
      settings: the canaries, and the confidence of the bounds.

    Returns:
      The content of audit.json, with the path of the page as `html`.

    Raises:
      ConfigError: as `train`, and for a run that is resumed.
      EngineError: the workers are lost.
    """
    expect_installed("markdown_it", "matplotlib")  # for its page, after hours perhaps
    expect("resume", run.resume, not run.resume, "a new run: what was planted is not kept")
    data = load_data(run.data, find_model(run.model.source, console), console.note)
    replaced = replacements(algorithm, settings, privacy, run, data)
    for change in replaced:
        console.note("the audit sets {setting}={used}: {why}".format(**change))
    changes = {change["setting"]: change["used"] for change in replaced}
    ours = {name: changes.pop(name) for name in OF_PRIVACY & changes.keys()}
    privacy, run = dataclasses.replace(privacy, **ours), changed_run(run, **changes)
    planted = plant(algorithm, settings, privacy, run.seed, data)
    summary = train(algorithm, privacy, run, console, plant=planted)
    if summary["steps_done"] < summary["num_steps"]:
        console.note("an audit cannot be resumed: to finish it, start it again in a new directory")
    newest, plan = checkpoint.latest(run.run_dir), directory.load(run.run_dir).plan
    assert newest is not None and plan is not None, "a run that ended has both"
    phases, delta = ledger.phases(ledger.read(run.run_dir)), summary["delta"]
    claim = _claim(claimed_phases(plan, phases), delta)
    with console.phase("attacking the model"):
        attacks = attack(planted, checkpoint.load_params(newest), data, settings, delta, claim)
    if phases is not None:
        bound = audit_noise(planted.noise, phases, delta, SHARP * (1 - settings.confidence))
        attacks["noise"] = dataclasses.asdict(bound)
    result = {
        "run_dir": str(run.run_dir),
        "algorithm": str(algorithm),
        **{name: summary[name] for name in OF_SUMMARY},
        "shared": isinstance(planted, PlantedAmongOthers),
        "replaced": replaced,
        "confidence": settings.confidence,
        **attacks,
    }
    result |= judge(result)
    write_json(run.run_dir / f"{NAME}.json", result)
    files = write(run.run_dir, NAME, "audit.md.jinja", **compose(result))
    return {**result, "html": files["html"]}


def plant(
    algorithm: Algorithm,
    settings: AuditConfig,
    privacy: PrivacyConfig,
    seed: int | None,
    data: Dataset,
) -> Planted:
    """The canaries of an audit, with the coins of who is included tossed.

    Args:
      privacy: with a group size, for els.
      seed: of the run; None: the coins are secret.
    """
    shared, group_size = graph_of(data.train) is not None, privacy.group_size or 1
    pools = POOLS if algorithm == Algorithm.ELS and not shared else 1
    rng = SecretKey.create(seed, "audit").generator("canaries")
    kind = Planted
    if shared:
        opposed = algorithm == Algorithm.ULS
        partners = partners_of(algorithm, privacy.max_changed)
        kind = functools.partial(PlantedAmongOthers, partners=partners, opposed=opposed)
    return kind(
        num_gradient=settings.gradient_canaries,
        num_text=settings.text_canaries,
        rows=group_size * pools,
        clip_norm=privacy.clip_norm,
        included=coins(settings.gradient_canaries + settings.text_canaries, rng),
        rng=rng,
    )


def replacements(
    algorithm: Algorithm,
    settings: AuditConfig,
    privacy: PrivacyConfig,
    run: RunConfig,
    data: Dataset,
) -> list[dict[str, Any]]:
    """Settings that an audit has to change, each a dict of setting, given, used and why."""
    replaced = []

    def replace(setting: str, given: Any, used: Any, why: str) -> None:
        if used != given:
            replaced.append({"setting": setting, "given": given, "used": used, "why": why})

    group_size = privacy.group_size
    if group_size is None and algorithm == Algorithm.ELS:
        group_size = median_group_size(examples_per_user(data.train))
        replace("group_size", None, group_size, "the median of the users without the canaries")
        why = "what choosing the group size costs is not attacked"
        replace("group_size_epsilon", privacy.group_size_epsilon, None, why)
    return replaced


def error_probability(result: dict[str, Any]) -> float:
    """Largest probability that a claim that holds is refuted: the sum over all tests.

    Args:
      result: confidence, and the attacks by name.
    """
    kinds = [result[kind] for kind in ("gradient", "text") if result[kind]]
    tests = sum(name in attack for attack in kinds for name in ("bound", "curve"))
    sharp = sum("independent" in attack for attack in kinds) + bool(result.get("noise"))
    return round((tests + SHARP * sharp) * (1 - result["confidence"]), 12)


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Compare the bounds with the claim.

    Args:
      result: epsilon, epsilon_holds, delta and confidence, and the attacks by name.

    Returns:
      `holds`: False if the claim is refuted; True if it could have been refuted and was not; None
      if it could not, or if nothing is claimed. `verdict`: the same in words.
      `epsilon_lower_bound` and `largest_possible`: the largest of all attacks. `error_probability`:
      see there. `canaries_needed`:
      the number, of one kind, that refutes the claim if every coin is guessed right; None if no
      number does.
    """
    of_kinds = [result[kind]["bound"] for kind in ("gradient", "text") if result[kind]]
    curves = [each["curve"] for k in ("gradient", "text") if (each := result[k] or {}).get("curve")]
    lower_bound = max((bound["epsilon"] for bound in of_kinds), default=0.0)
    largest = max((bound["largest_possible"] for bound in of_kinds), default=0.0)
    independent = (result["gradient"] or {}).get("independent")
    noise = result.get("noise")
    claimed, label = float(result["epsilon"]), result["epsilon_holds"]
    needed = None
    if math.isfinite(claimed):
        needed = bounds.canaries_needed(claimed, result["delta"], result["confidence"])
    if math.isinf(claimed):
        holds, verdict = None, "no privacy is claimed"
    elif label not in (*ADJACENCY.values(), REPRODUCTION):  # a known seed does not weaken an attack
        holds, verdict = None, f"nothing is claimed: epsilon is {claimed:.3f} {label}"
    elif lower_bound > claimed:
        holds, verdict = False, f"at most {claimed:.3f} is claimed: THE CLAIM IS REFUTED"
    elif any(curve["refuted"] for curve in curves):
        holds = False
        verdict = f"the curve of at most {claimed:.3f} is claimed: THE CLAIM IS REFUTED"
    elif noise and noise["refuted"]:
        least = f"{noise['noise_multiplier']:.4g}, where {noise['claimed']:.4g} is claimed"
        holds, verdict = False, f"the noise multiplier is at most {least}: THE CLAIM IS REFUTED"
    elif independent and independent["refuted"]:
        holds = False
        verdict = f"at most {claimed:.3f} is claimed: THE CLAIM IS REFUTED, {PREMISE}"
    elif largest <= claimed and not any(curve["could_refute"] for curve in curves):
        takes = f"at least {needed:,} canaries of one kind" if needed else "a smaller delta"
        most = f"with every coin guessed right it would be {largest:.3f}"
        verdict = f"at most {claimed:.3f} is claimed: INCONCLUSIVE, for {most}"
        verdict = f"{verdict}; to refute the claim takes {takes}"
        holds = None
        if independent and independent["could_refute"]:
            holds, verdict = True, f"at most {claimed:.3f} is claimed: not refuted, {PREMISE}"
    else:
        holds, verdict = True, f"at most {claimed:.3f} is claimed: not refuted"
    if holds and (done := result["steps_done"]) < (steps := result["num_steps"]):
        holds, verdict = None, f"{verdict}, but stopped after {done} of {steps} steps: INCONCLUSIVE"
    return {
        "epsilon_lower_bound": lower_bound,
        "largest_possible": largest,
        "error_probability": error_probability(result),
        "canaries_needed": needed,
        "verdict": verdict,
        "holds": holds,
    }


def _claim(phases: Phases | None, delta: float) -> Claim | None:
    """The whole trade-off curve that these releases claim; None without noise."""
    if phases is None:
        return None
    epsilons = np.linspace(0, 2 * accounting.epsilon(phases, delta) + 1, CURVE_POINTS)
    return curve_claim(epsilons, accounting.privacy_curve(phases, epsilons))


def attack(
    planted: Planted,
    params: Any,
    data: Dataset,
    settings: AuditConfig,
    delta: float,
    claim: Claim | None = None,
) -> dict[str, Any]:
    """Run all attacks on a trained model.

    Args:
      params: of the trained model.
      data: without the canaries.
      delta: of the claim.
      claim: the claimed trade-off curve; None without noise.

    Returns:
      Results by "gradient", "text" and "membership"; None for an attack without targets.
    """
    inner = planted.task_inner
    results: dict[str, Any] = {"gradient": None, "text": None, "membership": None}
    if planted.num_gradient:
        scores, included = planted.gradient_scores(), planted.gradient_included
        results["gradient"] = _outcome(scores, included, delta, settings.confidence, claim)
        if claim is not None:
            significance = SHARP * (1 - settings.confidence)
            independent = audit_independent(scores, included, claim, delta, significance)
            results["gradient"]["independent"] = dataclasses.asdict(independent)
    if planted.num_text:
        task = LanguageModelTask(Dataset(train=planted.texts), inner.config, inner.frozen)
        rows = np.arange(planted.num_text)
        gain = losses(task, planted.first, "train", rows) - losses(task, params, "train", rows)
        results["text"] = _outcome(gain, planted.text_included, delta, settings.confidence, claim)
    if settings.attacked_users and data.eval_users is not None:
        task = LanguageModelTask(data, inner.config, inner.frozen)
        inside, outside = (
            user_scores(task, planted.first, params, split, settings.attacked_users)
            for split in ("train", "eval_users")
        )
        counts = {"users_in": len(inside), "users_out": len(outside)}
        results["membership"] = {**counts, **_curve(inside, outside)}
    return results


def losses(task: Any, params: Any, split: str, rows: np.ndarray) -> np.ndarray:
    """Losses of the examples `rows` [n] of a split, float64 [n]."""
    frozen = () if task.frozen is None else (task.frozen,)
    compute = jax.jit(task.losses)
    parts = []
    for low in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[low : low + ROWS_AT_ONCE]
        padded = np.pad(chunk, (0, ROWS_AT_ONCE - len(chunk)), constant_values=-1)
        batch = read_rows(task, split, padded)
        parts.append(np.asarray(compute(params, batch, *frozen), np.float64)[: len(chunk)])
    return np.concatenate([np.zeros(0), *parts])


def user_scores(task: Any, first: Any, params: Any, split: str, most: int) -> np.ndarray:
    """Decrease of the mean loss of texts of some users of a split, float64 [users].

    The attack is no weaker than that of the source, which takes other texts of the same users: here
    they are the texts that were trained on.

    Args:
      first, params: the parameters before and after training.
      most: number of users, evenly spaced over the split.

    Source: Kandpal et al. 2023, Section 4 (the likelihood ratio to a model before fine-tuning).
    """
    if getattr(task.dataset, split).owners is not None:
        rows = rows_of_users(task.dataset, split, most, MOST_ROWS)
    else:
        offsets = getattr(task.dataset, split).offsets
        users = np.linspace(0, len(offsets) - 2, min(most, len(offsets) - 1)).astype(np.int64)
        rows = [np.arange(offsets[u], min(offsets[u + 1], offsets[u] + MOST_ROWS)) for u in users]
    rows = [each for each in rows if len(each)]
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    gain = losses(task, first, split, flat) - losses(task, params, split, flat)
    ends = np.cumsum([len(each) for each in rows])
    return np.array([part.mean() for part in np.split(gain, ends[:-1])])


def _outcome(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    confidence: float,
    claim: Claim | None,
) -> dict[str, Any]:
    """The bounds, each with this confidence, and the ROC curve of the scores."""
    bound = bounds.audit(scores, included, delta, confidence)
    outcome: dict[str, Any] = {"bound": dataclasses.asdict(bound)}
    if claim is not None:
        curve = audit_curve(scores, included, claim, delta, confidence)
        outcome["curve"] = dataclasses.asdict(curve)
    if included.any() and not included.all():
        outcome |= _curve(scores[included], scores[~included])
    return outcome


def _curve(inside: np.ndarray, outside: np.ndarray) -> dict[str, Any]:
    """The ROC curve, its area, and the true positive rate at ALARMS false positives."""
    false, true = bounds.roc(inside, outside)
    return {
        "auc": bounds.area(inside, outside),
        "true_positives_at_1_percent": float(true[false <= ALARMS].max()),
        "roc": {"false": false.tolist(), "true": true.tolist()},
    }


def sentence(result: dict[str, Any]) -> str:
    """The result in one line."""
    bound = f"epsilon is at least {result['epsilon_lower_bound']:.3f}"
    bound += f" (confidence {result['confidence']:g} for each bound; all tests together refute a "
    bound += f"claim that holds with a probability of at most {result['error_probability']:g})"
    return f"{bound}; {result['verdict']}"


def compose(result: dict[str, Any]) -> dict[str, Any]:
    """Values for the template audit.md.jinja."""
    attacks = {title: result[kind] for kind, title in KINDS.items() if result[kind]}
    return {
        "title": "Audit of a training",
        "sentence": sentence(result),
        "attacks": attacks,
        "independent": (result["gradient"] or {}).get("independent"),
        "noise": result.get("noise"),
        "shared": result.get("shared"),
        "replaced": result["replaced"],
        "charts": [
            _roc(name, attack["roc"]) for name, attack in attacks.items() if "roc" in attack
        ],
    }


def _roc(attack: str, roc: dict[str, list[float]]) -> Chart:
    return Chart(
        f"{attack}: recognised against wrongly suspected",
        "share suspected, of those left out",
        "share suspected, of those included",
        [
            Series("attack", roc["false"], roc["true"]),
            Series("guessing", [0, 1], [0, 1], dashed=True),
        ],
    )
