"""Audit of a training: attacks that may refute the epsilon that it claims.

The training is the user's own command, with canaries among its users, each included by the toss of
a coin (`canaries`). Three tests compare the releases with the claim (`bounds`): guesses of the
coins without an assumption (`curve`), guesses for gradient canaries that depend on their own coins
alone (`independent`), and the length of the noise. Each has a verdict. A claim that is not refuted
is not proven, because attacks only get better.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from fedsim import accounting
from fedsim.accounting import Events
from fedsim.config import Algorithm, AuditConfig, PrivacyConfig, RunConfig
from fedsim.data import Dataset
from fedsim.engine import read_rows
from fedsim.errors import expect
from fedsim.files import write_json
from fedsim.keys import SecretKey
from fedsim.models import LanguageModelTask
from fedsim.plan import ADJACENCY, Fact, accounted_events, in_words
from fedsim.run import Console, checkpoint, directory, ledger
from fedsim.training import Purpose, train
from fedsim.trust.bounds import (
    Claim,
    audit_curve,
    audit_independent,
    audit_noise,
    curve_claim,
)
from fedsim.trust.canaries import POOLS, Canaries, coins

NAME = "audit"
ROWS_AT_ONCE = 16
CURVE_POINTS = 400
SHARP = 0.01
"""Share of a test's error probability for each of the two tests with more assumptions than
guessing; they find mistakes with as little."""
REFUTED, NOT_REFUTED, TOO_FEW = "REFUTED", "not refuted", "INCONCLUSIVE"
NOISE = "length of the noise"
INDEPENDENT = "gradient canaries, if each tells of its own coin alone"
GUESSES_SEEN = (
    "{correct} of {guesses} coins guessed, as a Gaussian mechanism of epsilon {epsilon:.3f} or more"
)
NOISE_SEEN = "noise multiplier at most {noise_multiplier:.4g}, {claimed:.4g} claimed"
TESTS = {
    "gradient canaries": ("gradient", "curve"),
    "text canaries": ("text", "curve"),
    INDEPENDENT: ("gradient", "independent"),
}
"""Tests by guesses, with their places in audit.json."""
OF_SUMMARY = ("epsilon", "epsilon_holds", "delta", "noise_multiplier", "sampling_run")
OF_SUMMARY += ("sampling_prob", "num_steps", "steps_done")


def audit(
    algorithm: Algorithm,
    settings: AuditConfig,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
) -> dict[str, Any]:
    """Train with canaries, attack, and write audit.json into the run's directory.

    Args:
      algorithm, privacy, run: the training that is audited.
      settings: the canaries, and the confidence of the tests.

    Returns:
      The content of audit.json.

    Raises:
      ConfigError: as `train`, and for a run that is resumed, ELS without a group size, or texts
        with several owners.
      EngineError: the workers are lost.
    """
    expect("resume", run.resume, not run.resume, "a new run: what was planted is not kept")
    has_size = privacy.group_size is not None or algorithm == Algorithm.ULS
    expect("group_size", None, has_size, "a number in an audit of els: its choice is not attacked")
    rng = SecretKey.create(run.seed, "audit").generator("canaries")
    planted = Canaries(
        num_gradient=settings.gradient_canaries,
        num_text=settings.text_canaries,
        rows=(privacy.group_size or 1) * (POOLS if algorithm == Algorithm.ELS else 1),
        clip_norm=privacy.clip_norm,
        included=coins(settings.gradient_canaries + settings.text_canaries, rng),
        rng=rng,
    )
    summary = train(algorithm, privacy, run, console, purpose=Purpose.AUDIT, audit=planted)
    if summary["steps_done"] < summary["num_steps"]:
        console.note("an audit cannot be resumed: to finish it, start it again in a new directory")
    newest, plan = checkpoint.latest(run.run_dir), directory.load(run.run_dir).plan
    assert newest is not None and plan is not None, "a run that ended has both"
    events, delta = ledger.phases(ledger.read(run.run_dir)), summary["delta"]
    claim = _claim(accounted_events(plan, events), delta)
    with console.phase("attacking the model"):
        attacks = attack(planted, checkpoint.load_params(newest), settings, delta, claim)
    if events is not None:
        bound = audit_noise(planted.noise, events, delta, SHARP * (1 - settings.confidence))
        attacks["noise"] = dataclasses.asdict(bound)
    result = {
        "run_dir": str(run.run_dir),
        "algorithm": str(algorithm),
        **{name: summary[name] for name in OF_SUMMARY},
        "planted": summary["purpose"]["planted"],
        "confidence": settings.confidence,
        **attacks,
    }
    result |= judge(result)
    write_json(run.run_dir / f"{NAME}.json", result)
    return result


def attack(
    planted: Canaries, params: Any, settings: AuditConfig, delta: float, claim: Claim | None
) -> dict[str, Any]:
    """Guess the coins of the canaries in a trained model.

    Args:
      params: of the trained model.
      delta: of the claim.
      claim: the claimed trade-off curve; None without noise.

    Returns:
      Results by "gradient" and "text"; None without canaries of that kind.
    """
    inner, confidence = planted.task_inner, settings.confidence
    results: dict[str, Any] = {"gradient": None, "text": None}
    if planted.num_gradient:
        scores, included = planted.gradient_scores(), planted.gradient_included
        curve = audit_curve(scores, included, claim, delta, confidence)
        results["gradient"] = {"curve": dataclasses.asdict(curve)}
        if claim is not None:
            alone = audit_independent(scores, included, claim, delta, SHARP * (1 - confidence))
            results["gradient"]["independent"] = dataclasses.asdict(alone)
    if planted.num_text:
        task = LanguageModelTask(Dataset(train=planted.texts), inner.config, inner.frozen)
        rows = np.arange(planted.num_text)
        before, after = (losses(task, x, "train", rows) for x in (planted.first, params))
        curve = audit_curve(before - after, planted.text_included, claim, delta, confidence)
        results["text"] = {"curve": dataclasses.asdict(curve)}
    return results


def losses(task: Any, params: Any, split: str, rows: np.ndarray) -> np.ndarray:
    """Losses of the examples `rows` [n] of a split, float64 [n]."""
    frozen = () if task.frozen is None else (task.frozen,)
    compute = jax.jit(task.losses)
    parts = [np.zeros(0)]
    for low in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[low : low + ROWS_AT_ONCE]
        padded = np.pad(chunk, (0, ROWS_AT_ONCE - len(chunk)), constant_values=-1)
        batch = read_rows(task, split, padded)
        parts.append(np.asarray(compute(params, batch, *frozen), np.float64)[: len(chunk)])
    return np.concatenate(parts)


def _claim(events: Events | None, delta: float) -> Claim | None:
    """The whole trade-off curve that these releases claim; None without noise."""
    if events is None:
        return None
    epsilons = np.linspace(0, 2 * accounting.epsilon(events, delta) + 1, CURVE_POINTS)
    return curve_claim(epsilons, accounting.privacy_curve(events, epsilons))


def tests_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tests of an audit, by their names in TESTS."""
    found = {name: (result.get(kind) or {}).get(test) for name, (kind, test) in TESTS.items()}
    found[NOISE] = result.get("noise")
    return {name: test for name, test in found.items() if test}


def error_probability(result: dict[str, Any]) -> float:
    """Largest probability that a claim that holds is refuted: the sum over all tests.

    Args:
      result: confidence, and the tests at their places.
    """
    shares = [SHARP if name in (NOISE, INDEPENDENT) else 1 for name in tests_of(result)]
    return round(sum(shares) * (1 - result["confidence"]), 12)


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Compare each test with the claim.

    Args:
      result: epsilon, epsilon_holds and confidence, and the tests at their places.

    Returns:
      `verdicts`: of each test. `holds`: False if one refutes the claim; True if guesses could have
      refuted it and did not; None if they could not, or if nothing is claimed. `verdict`: the same
      in words. `error_probability`: see there.
    """
    verdicts = {name: _verdict(test) for name, test in tests_of(result).items()}
    refuting = [name for name, verdict in verdicts.items() if verdict == REFUTED]
    guesses = [verdict for name, verdict in verdicts.items() if name != NOISE]
    holds, verdict = True, NOT_REFUTED
    if refuting:
        holds, verdict = False, f"THE CLAIM IS REFUTED, by: {'; '.join(refuting)}"
    elif NOT_REFUTED not in guesses:
        holds, verdict = None, f"{TOO_FEW}: so few canaries could not refute it"
    elif (done := result["steps_done"]) < (steps := result["num_steps"]):
        holds, verdict = None, f"{TOO_FEW}: stopped after {done} of {steps} steps"
    epsilon, label = float(result["epsilon"]), result["epsilon_holds"]
    if math.isinf(epsilon):
        holds, verdict = None, "no privacy is claimed"
    elif label not in (*ADJACENCY.values(), Fact.KNOWN_SEED):  # a seed does not weaken an attack
        holds, verdict = None, f"nothing is claimed of epsilon = {epsilon:.3f}: {in_words(label)}"
    else:
        verdict = f"at most {epsilon:.3f} is claimed: {verdict}"
    return {
        "error_probability": error_probability(result),
        "verdicts": verdicts,
        "verdict": verdict,
        "holds": holds,
    }


def _verdict(test: dict[str, Any]) -> str:
    if test["refuted"]:
        return REFUTED
    return NOT_REFUTED if test.get("could_refute", True) else TOO_FEW


def sentence(result: dict[str, Any]) -> str:
    """The verdict, and a line for each test."""
    lines = [f"epsilon: {result['verdict']}"]
    for name, test in tests_of(result).items():
        seen = GUESSES_SEEN if name != NOISE else NOISE_SEEN
        lines.append(f"{name}: {result['verdicts'][name]} ({seen.format(**test)})")
    often = f"{result['error_probability']:g}"
    return "\n".join([*lines, f"A claim that holds is refuted with a probability <= {often}."])
