"""The privacy report of a run: the claim, what it rests on, and what it leaves out.

Follows the list of what to report of "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3).
Every number about privacy is computed from the ledger when the report is written, and every bound
is rounded up. A run that breaks any promise that `verify` looks at gets no report.
"""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

from fedsim.accounting import at_most
from fedsim.config import settings_of, to_json
from fedsim.files import write_atomically
from fedsim.plan import AllocatedSampling, Audit, CorrelatedNoise, claimed_phases
from fedsim.run import Console, directory, ledger
from fedsim.trust import registry
from fedsim.trust.claim import (
    Gaussian,
    Released,
    ReportError,
    claim,
    curve,
    gaussian,
    over_steps,
    recognised,
    warnings,
)
from fedsim.trust.claim_fields import facts
from fedsim.trust.pages import write
from fedsim.trust.plots import Chart, Series
from fedsim.trust.verify import verify

NAME = "report"


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`, and registry.yaml if it claims anything.

    Raises: ConfigError: there is no run, or another process is working on it. ReportError: a
      promise is violated, there is no model to report of, or it is an audit's.
    """
    with directory.lock(run_dir, to_read=True):
        released = read(run_dir, console)
        shown, entry = compose(released), registry.entry(released)
    files = write(out, NAME, "report.md.jinja", **shown)
    if entry is not None:
        write_atomically(out / registry.FILE, registry.as_yaml(entry).encode())
    return {
        "run_dir": str(run_dir),
        **files,
        "registry": None if entry is None else str(out / registry.FILE),
        "epsilon": to_json(released.epsilon),
        "delta": released.plan.delta,
        "epsilon_holds": released.plan.epsilon_holds,
        "guarantee": released.plan.guarantee,
        "claim": claim(released),
    }


def read(run_dir: Path, console: Console) -> Released:
    """What a run has released. Raises: as `report`."""
    checks = verify(run_dir, console=console)
    for check in checks:
        if check.holds is False:
            raise ReportError(f"nothing to report: {check.promise} violated: {check.found}")
    stored, lines = directory.load(run_dir), ledger.read(run_dir)
    plan = stored.plan
    assert plan is not None, "verify() found one"
    if isinstance(plan.purpose, Audit):
        raise ReportError("nothing to report: an audit's run, some of whose users were made up")
    phases = claimed_phases(plan, ledger.phases(lines))
    found = Released(run_dir, stored, plan, lines, phases, math.inf, checks)
    slack = plan.slack_after(found.num_steps)
    epsilon = ledger.epsilon_of(phases, plan.delta - slack.delta) + slack.epsilon
    return dataclasses.replace(found, epsilon=epsilon)


def compose(released: Released) -> dict[str, Any]:
    """The facts that the report's template needs."""
    shown = facts(released) | {
        "title": f"Privacy report: {released.run_dir.resolve().name}",
        "subject": "this run",
        "recognised": recognised(released),
        "warnings": warnings(released),
        "curve": None,
        "steps": None,
        "gaussian": None,
        "settings": _settings(released),
        "summary": directory.summary_of(released.run_dir),
        "fingerprints": _fingerprints(released),
        "commands": _commands(released),
    }
    if released.phases is not None and released.num_steps:
        bound = gaussian(released)
        shown["gaussian"] = None if math.isinf(bound.mu) else bound
        shown |= {"curve": _curve(released, shown["gaussian"]), "steps": _steps(released)}
    return shown


def _curve(released: Released, bound: Gaussian | None) -> Chart:
    """Delta at each epsilon; dashed, what a Gaussian that is no more private says of it."""
    epsilons, deltas = curve(released)
    lines = [Series("delta", epsilons.tolist(), deltas.tolist())]
    if bound is not None:
        mu, rho = at_most(bound.mu, ".3g"), at_most(bound.rho, ".3g")
        names = (f"mu-GDP, mu = {mu}", f"zCDP, rho = {rho}")
        for name, above in zip(names, bound.deltas(epsilons), strict=True):
            lines.append(Series(name, epsilons.tolist(), above.tolist(), dashed=True))
    title = f"Delta at each epsilon, after {released.num_steps} steps{_in_brackets(released)}"
    labels = "epsilon", "delta (logarithmic)"
    return Chart(title, *labels, lines, log_y=True, bounds=True)


def _steps(released: Released) -> Chart | None:
    """Epsilon by the number of steps; None where there is one number or none."""
    steps, spent = over_steps(released)
    if len(steps) < 2:
        return None
    delta, target = at_most(released.plan.delta, ".2e"), released.plan.target_epsilon
    asked = Series("asked for", [steps[0], steps[-1]], [target, target], dashed=True)
    title = "Epsilon of each number of steps, fixed beforehand, "
    title += f"at delta = {delta}{_in_brackets(released)}"
    return Chart(title, "steps", "epsilon", [Series("accounted", steps, spent), asked], bounds=True)


def _in_brackets(released: Released) -> str:
    return f" ({released.label})" if released.label else ""


def _settings(released: Released) -> list[tuple[str, str]]:
    """Settings by name; of the data's place, its name alone."""
    run = settings_of(released.stored.run)
    counts = ("num_units", "budget", "target_epsilon", "num_parameters", "clip_quantile")
    names = ("model", "lora_rank", "optimizer", "learning_rate", "compute_dtype")
    values = {name: getattr(released.plan, name) for name in counts}
    return [
        ("data", Path(run["data"]).name),
        *((name, f"{value:,}") for name, value in values.items() if value is not None),
        *((name, str(run.get(name))) for name in names),
        ("strategy", str(released.stored.strategy.get("name"))),
    ]


def _fingerprints(released: Released) -> list[tuple[str, str]]:
    head = released.lines[0]["head"]
    return [
        ("parameters, sha256", released.fingerprint),
        ("ledger, last link", released.lines[-1]["chain"]),
        ("settings (`config.json`), sha256", head["config_sha256"]),
        ("data, sealed with the key", released.plan.data_seal),
        ("model trained from", str(released.stored.identity.model or "fresh parameters")),
        *((name, number) for name, number in released.stored.versions.items()),
    ]


def _commands(released: Released) -> list[str]:
    """Commands that verify the run, and compute its epsilon from public constants."""
    plan, path = released.plan, shlex.quote(str(released.run_dir))
    lines = [f"fedsim verify {path}{flag}" for flag in ("", " --replay", " --whole")]
    event, cell = plan.event(), {}
    if isinstance(plan.noise, CorrelatedNoise):
        cell["noise"] = plan.noise.kind
    if plan.sampling.bands > 1 or cell:
        cell["bands"] = plan.sampling.bands
    if isinstance(plan.sampling, AllocatedSampling):
        cell["participations"] = plan.sampling.participations
    if released.phases is not None:
        lines.append(
            f"fedsim account {plan.algorithm} --num-steps {released.num_steps} "
            f"--sampling-prob {plan.accounted_prob!r} --noise-multiplier {plan.noise_multiplier!r} "
            f"--group-size {plan.group_size} --delta {plan.delta!r}"
            + (f" --max-changed {event.max_changed}" if event and event.max_changed else "")
            + (f" --sampling {plan.sampling.kind}" if cell else "")
            + "".join(f" --{name} {value}" for name, value in cell.items())
            + "".join(f" --before {event.epsilon!r}" for event, _ in plan.before)
        )
    return lines
