"""Audit of a training: attacks that may refute the epsilon that it claims.

The training is the user's own command, with canaries among its users, each included by the toss of
a coin (`canaries`). Three tests compare the releases with the claim (`bounds`): guesses of the
coins without an assumption (`curve`), guesses for canaries that depend on their own coins alone
(`guesses`), and the length of the noise. Each has a verdict. A claim that is not refuted is not
proven, because attacks only get better.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import Events
from fedsim.config import Algorithm, AuditConfig, PrivacyConfig, RunConfig
from fedsim.errors import expect
from fedsim.files import write_json
from fedsim.keys import SecretKey
from fedsim.plan import accounted_events
from fedsim.run import Console, directory, ledger
from fedsim.training import Purpose, train
from fedsim.trust.bounds import audit_curve, audit_guesses, audit_noise, curve_claim
from fedsim.trust.canaries import POOLS, Canaries, coins

CURVE_POINTS = 400
REFUTED, NOT_REFUTED, TOO_FEW = "REFUTED", "not refuted", "INCONCLUSIVE"
FINDINGS = {
    "curve": "{correct} of {guesses} coins guessed, with no assumption on the canaries",
    "guesses": "{correct} of {guesses} coins guessed, as with epsilon {epsilon:.3f} or more",
    "noise": "noise multiplier at most {noise_multiplier:.4g}, {claimed:.4g} claimed",
}
"""Findings of the tests, by their names in audit.json."""
OF_SUMMARY = ("epsilon", "epsilon_holds", "delta", "noise_multiplier", "sampling_prob")
OF_SUMMARY += ("num_steps", "steps_done")


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

    Returns: The content of audit.json.

    Raises:
      ConfigError: as `train`, and for a run that is resumed or claims nothing, ELS without a group
        size, or texts with several owners.
      EngineError: the workers are lost.
    """
    expect("resume", run.resume, not run.resume, "a new run: what was planted is not kept")
    claims = math.isfinite(privacy.epsilon)
    expect("epsilon", privacy.epsilon, claims, "a finite one: without noise nothing is claimed")
    has_size = privacy.group_size is not None or algorithm == Algorithm.ULS
    expect("group_size", None, has_size, "a number in an audit of els: its choice is not attacked")
    rng = SecretKey.create(run.seed, "audit").generator("canaries")
    rows = (privacy.group_size or 1) * (POOLS if algorithm == Algorithm.ELS else 1)
    planted = Canaries(coins(settings.gradient_canaries, rng), rows, privacy.clip_norm)
    summary = train(algorithm, privacy, run, console, purpose=Purpose.AUDIT, audit=planted)
    if summary["steps_done"] < summary["num_steps"]:
        console.note("an audit cannot be resumed: to finish it, start it again in a new directory")
    plan, events = directory.load(run.run_dir).plan, ledger.phases(ledger.read(run.run_dir))
    assert plan is not None and events is not None, "a run that ended has both"
    claimed = accounted_events(plan, events) or []
    with console.phase("attacking the model"):
        attacks = attack(planted, claimed, events, plan.delta, settings.confidence)
    result = {
        "run_dir": str(run.run_dir),
        "algorithm": str(algorithm),
        **{name: summary[name] for name in OF_SUMMARY},
        "planted": summary["planted"],
        "confidence": settings.confidence,
        **attacks,
    }
    result |= judge(result)
    write_json(run.run_dir / "audit.json", result)
    return result


def attack(
    planted: Canaries, claimed: Events, events: Events, delta: float, confidence: float
) -> dict[str, Any]:
    """The results of the tests of a training, by their names in FINDINGS.

    Args:
      claimed: the events that the claim accounts for.
      events: those of the releases.
      delta: of the claim.
      confidence: of a refutation; the tests share the probability of an error.
    """
    epsilons = np.linspace(0, 2 * accounting.epsilon(claimed, delta) + 1, CURVE_POINTS)
    claim = curve_claim(epsilons, accounting.privacy_curve(claimed, epsilons))
    error = (1 - confidence) / len(FINDINGS)
    scores, included = planted.scores(), planted.included
    results = {
        "curve": audit_curve(scores, included, claim, error),
        "guesses": audit_guesses(scores, included, claim, delta, error),
        "noise": audit_noise(planted.noise, events, error),
    }
    return {name: dataclasses.asdict(found) for name, found in results.items()}


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Compare each test with the claim.

    Args: result: epsilon, num_steps and steps_done, and the tests.

    Returns:
      `verdicts`: of each test. `holds`: False if one refutes the claim; True if guesses could have
      refuted it and did not; None if they could not. `verdict`: the same in words.
    """
    verdicts = {}
    for name in FINDINGS:
        test = result[name]
        sure = NOT_REFUTED if test.get("could_refute", True) else TOO_FEW
        verdicts[name] = REFUTED if test["refuted"] else sure
    refuting = [name for name, verdict in verdicts.items() if verdict == REFUTED]
    holds, verdict = True, NOT_REFUTED
    if refuting:
        holds, verdict = False, f"THE CLAIM IS REFUTED, by: {'; '.join(refuting)}"
    elif verdicts["guesses"] == TOO_FEW:  # and then those of `curve` are too few as well
        holds, verdict = None, f"{TOO_FEW}: so few canaries could not refute it"
    elif (done := result["steps_done"]) < (steps := result["num_steps"]):
        holds, verdict = None, f"{TOO_FEW}: stopped after {done} of {steps} steps"
    return {
        "verdicts": verdicts,
        "verdict": f"at most {result['epsilon']:.3f} is claimed: {verdict}",
        "holds": holds,
    }


def sentence(result: dict[str, Any]) -> str:
    """The verdict, and a line for each test."""
    lines = [f"epsilon: {result['verdict']}"]
    for name, finding in FINDINGS.items():
        lines.append(f"{name}: {result['verdicts'][name]} ({finding.format(**result[name])})")
    often = f"{1 - result['confidence']:.3g}"
    return "\n".join([*lines, f"A claim that holds is refuted with a probability <= {often}."])
