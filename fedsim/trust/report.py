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

from fedsim.accounting.rounding import at_most
from fedsim.config import Algorithm, settings_of, to_json
from fedsim.config.privacy import INDEPENDENT
from fedsim.files import make_place, read_json, write_atomically
from fedsim.plan import Plan, claimed_phases
from fedsim.run import directory, ledger
from fedsim.run.console import Console
from fedsim.trust import registry
from fedsim.trust.claim import Released, ReportError, claim, curve, gaussian, in_words, over_steps
from fedsim.trust.claim_fields import held_out, items, slack
from fedsim.trust.document import Code, Document, Items, Quote, Section, Table, to_html, to_markdown
from fedsim.trust.evidence import Check
from fedsim.trust.glossary import WORDS
from fedsim.trust.questions import answers
from fedsim.trust.svg import Chart, Series
from fedsim.trust.verify import verify

HTML, MARKDOWN = "report.html", "report.md"


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`, and registry.yaml if it claims anything.

    Raises: ConfigError: there is no run, or another process is working on it. ReportError: a
      promise is violated, there is no model to report of, or it is an audit's.
    """
    with directory.lock(run_dir, to_read=True):
        released = read(run_dir, console)
        document, entry = compose(released), registry.entry(released)
    make_place(out)
    write_atomically(out / HTML, to_html(document).encode())
    write_atomically(out / MARKDOWN, to_markdown(document).encode())
    if entry is not None:
        write_atomically(out / registry.FILE, registry.as_yaml(entry).encode())
    return {
        "run_dir": str(run_dir),
        "html": str(out / HTML),
        "markdown": str(out / MARKDOWN),
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
    if plan.planted is not None:
        raise ReportError("nothing to report: an audit's run, some of whose users were made up")
    phases = claimed_phases(plan, ledger.phases(lines))
    found = Released(run_dir, stored, plan, lines, phases, math.inf, checks)
    slack = plan.slack_after(found.num_steps)
    epsilon = ledger.epsilon_of(phases, plan.delta - slack.delta) + slack.epsilon
    return dataclasses.replace(found, epsilon=epsilon)


def compose(released: Released) -> Document:
    """The report's sections."""
    sections = [
        Section("The claim", [Quote(claim(released)), *in_words(released)]),
        Section("What was done, item by item", [items(released)]),
    ]
    if released.phases is not None and released.num_steps:
        sections.append(Section("The whole trade-off", _charts(released)))
    sections += [
        Section("What the guarantee does not cover", _outside(released)),
        Section("Was it checked?", _checked(released.checks)),
        Section("Settings and results", [_settings(released)]),
        Section("The questions of NIST SP 800-226", answers(released)),
        Section("Fingerprints and versions", [_fingerprints(released)]),
        Section("How to verify this yourself", _commands(released)),
        Section("Words", [WORDS]),
    ]
    return Document(f"Privacy report: {released.run_dir.resolve().name}", sections)


def _charts(released: Released) -> list[Any]:
    epsilons, deltas = curve(released)
    label = f" ({released.label})" if released.label else ""
    steps, spent = over_steps(released)
    target = released.plan.target_epsilon
    blocks: list[Any] = [
        "A guarantee is not one pair of numbers but a curve: the model has all of these pairs at "
        f"once. The claim quotes the one at delta = {at_most(released.plan.delta, '.2e')}{label}.",
        Chart(
            f"Delta at each epsilon, after {released.num_steps} steps{label}",
            "epsilon",
            "delta (logarithmic)",
            [Series("delta", epsilons.tolist(), deltas.tolist()), *_bounds(released, epsilons)],
            log_y=True,
            bounds=True,
        ),
        *_as_gaussian(released),
    ]
    if len(steps) > 1:
        goal = Series("asked for", [steps[0], steps[-1]], [target, target], dashed=True)
        delta = at_most(released.plan.delta, ".2e")
        title = f"Epsilon of so many steps, fixed beforehand, at delta = {delta}{label}"
        lines = [Series("accounted", steps, spent), goal]
        blocks.append(Chart(title, "steps", "epsilon", lines, bounds=True))
    return blocks


def _bounds(released: Released, epsilons: Any) -> list[Series]:
    """The curves of Gaussian and zero-concentrated differential privacy, which lie above."""
    found = gaussian(released)
    if math.isinf(found.mu):
        return []
    names = (f"mu-GDP, mu = {at_most(found.mu, '.3g')}", f"zCDP, rho = {at_most(found.rho, '.3g')}")
    pairs = zip(names, found.deltas(epsilons), strict=True)
    return [Series(name, epsilons.tolist(), deltas.tolist(), dashed=True) for name, deltas in pairs]


def _as_gaussian(released: Released) -> list[str]:
    found = gaussian(released)
    if math.isinf(found.mu):
        return ["No Gaussian mechanism is close to this one, so no mu and no rho are given."]
    return [
        "As one number: with ideal noise all steps together are mu-GDP with mu = "
        f"{at_most(found.mu, '.4g')}, hence rho-zCDP with rho = mu^2 / 2 = "
        f"{at_most(found.rho, '.4g')}, each but for a probability "
        f"of {at_most(found.set_aside, '.2e')}. The mu^2 of several releases add up, as do their "
        "probabilities; what noise that is not ideal adds is among the items above. The dashed "
        "lines are what follows from them; the curve says more."
    ]


def _outside(released: Released) -> list[Any]:
    facts = list(released.plan.non_private)
    about = "The guarantee is about" if released.plan.guarantee else "No guarantee is claimed for"
    return [
        f"{about} the released model and ledger. These are computed from the "
        "users' texts without protection, or known to others:",
        Items(
            [
                *facts,
                "metrics named `non_private/…` (training loss, norms, sizes of draws), loss on "
                "held-back texts of training users, and the times that steps took: not to be "
                "published",
                "the secret key (`secret.json`), and whatever else the driver and the workers "
                "hold: whoever can read that can read the texts",
                _held_out(released.plan),
                _shared_with_others(released.plan),
                "a person with several ids in the data: protected for each id alone",
            ]
        ),
        *_arithmetic(released),
    ]


def _held_out(plan: Plan) -> str:
    if (how := plan.evaluations) is None:
        return (
            "texts of held-out users, on which the model is evaluated without noise: their "
            "loss is in `summary.json` and among the settings and results below"
        )
    label = "no guarantee, for the seed is known; " if plan.seeded else ""
    return (
        "texts of held-out users are not trained on. Their loss, in `summary.json` and among the "
        f"settings and results below, has noise: {label}at most {how.count:,} evaluations cost "
        f"each of these users epsilon = {at_most(how.epsilon, '.4g')} at delta = "
        f"{at_most(how.delta, '.2e')} together (zero-out), counted in the ledger of the data"
    )


def _shared_with_others(plan: Plan) -> str:
    if plan.shared is None:
        return "what a user shares with others: each is protected for their own copy"
    return (
        "who owns which text: that someone wrote, how much, and to whom is not hidden, and decides "
        "which texts are used; and what others wrote about a user in texts of their own"
    )


def _arithmetic(released: Released) -> list[str]:
    """What the guarantee of the program rests on, beside that of the paper."""
    if released.phases is None:
        return []
    unit = "text" if released.plan.algorithm == Algorithm.ELS else "user"
    bound = (
        f"What a {unit} adds to a sum is in whole numbers, of a length that is proven to be at "
        "most the clip norm in the arithmetic that was run, and sums of whole numbers are exact: "
        f"without a {unit}, the sum lacks what that {unit} added, and nothing else."
    )
    if released.plan.unproven is not None:
        bound = f"For the strategy {released.plan.unproven} no bound on a {unit}'s share is proven."
    return [
        bound,
        "The noise is rounded to a lattice that is the same whatever the data are. Noise and draws "
        "come from AES-128 in counter mode, keyed by HKDF from 256 secret bits: the claim is about "
        "whoever cannot break AES. How far the noise is from the ideal of the mathematics is "
        f"computed, and part of the claim: {slack(released)}.",
        "Not part of any proof: that processor, compiler and libraries compute as they should, and "
        "what times, power or memory of the machine gave away.",
    ]


def _checked(checks: list[Check]) -> list[Any]:
    rows = [(check.promise, check.verdict, check.found) for check in checks]
    return [
        "When this report was written, the ledger was replayed against everything else in the "
        "run's directory, as `fedsim verify` does:",
        Table(("promise", "", "found"), rows),
    ]


def _settings(released: Released) -> Table:
    names = ("num_units", "budget", "target_epsilon", "num_parameters", "clip_quantile")
    rows = [(n, f"{v:,}") for n in names if (v := getattr(released.plan, n)) is not None]
    run = settings_of(released.stored.run)
    names = ("data", "model", "lora_rank", "optimizer", "learning_rate", "compute_dtype")
    rows += [(name, str(run.get(name))) for name in names[1:]]
    rows.insert(0, ("data", Path(run["data"]).name))
    rows.append(("strategy", str(released.stored.strategy.get("name"))))
    path = released.run_dir / directory.SUMMARY
    if path.exists():
        summary = read_json(path)
        names = ("initial_eval_loss", "final_eval_loss")
        found = [(name, summary[name]) for name in names if summary[name] != "nan"]
        noise = "with noise" if released.plan.evaluations else "without noise: not protected"
        if released.plan.shared:
            noise += ", and other owners of them are trained on"
        rows += [(f"{name} ({held_out(released)}, {noise})", f"{loss}") for name, loss in found]
        if lost := summary.get("lost_steps"):
            rows.append(("steps that were released and lost to a crash", str(lost)))
    else:
        rows.append(("results", "the run has not ended"))
    return Table(("setting", "value"), rows)


def _fingerprints(released: Released) -> Table:
    head = released.lines[0]["head"]
    rows = [
        ("parameters, sha256", released.fingerprint),
        ("ledger, last link", released.lines[-1]["chain"]),
        ("settings (`config.json`), sha256", head["config_sha256"]),
        ("data, sealed with the key", released.plan.data_seal),
        ("model trained from", str(released.stored.identity.model or "fresh parameters")),
        *((name, number) for name, number in released.stored.versions.items()),
    ]
    return Table(("what", "value"), [(name, f"`{value}`") for name, value in rows])


def _commands(released: Released) -> list[Any]:
    plan, path = released.plan, shlex.quote(str(released.run_dir))
    lines = [f"fedsim verify {path}{flag}" for flag in ("", " --replay", " --whole")]
    event, cell = plan.event(), {}
    if plan.noise != INDEPENDENT:
        cell["noise"] = plan.noise
    if plan.bands > 1 or cell:
        cell["bands"] = plan.bands
    if plan.participations:
        cell["participations"] = plan.participations
    if released.phases is not None:
        lines.append(
            f"fedsim account {plan.algorithm} --num-steps {released.num_steps} "
            f"--sampling-prob {plan.accounted_prob!r} --noise-multiplier {plan.noise_multiplier!r} "
            f"--group-size {plan.group_size} --delta {plan.delta!r}"
            + (f" --max-changed {event.max_changed}" if event and event.max_changed else "")
            + (f" --sampling {plan.sampling_run}" if cell else "")
            + "".join(f" --{name} {value}" for name, value in cell.items())
            + "".join(f" --before {event.epsilon!r}" for event, _ in plan.before)
        )
    return [
        "The first holds the ledger against everything else. The second also computes the last "
        "steps again from the key and the data, and compares every bit; the third does so with all "
        f"{plan.num_steps} steps. `fedsim account` computes epsilon from the public constants "
        "alone. What an attacker really achieves is measured by `fedsim audit`.",
        Code("\n".join(lines)),
    ]
