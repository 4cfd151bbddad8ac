"""The privacy report of a run: the claim, what it rests on, and what it leaves out.

Follows the list of what to report of "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3).
Every number about privacy is computed from the ledger when the report is written; a run whose
ledger, settings or claim have been changed gets none.
"""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting, checkpoint, ledger, rundir
from fedsim.accounting import Event, RunningEpsilon, StepEvent
from fedsim.config import Algorithm, FedsimError
from fedsim.console import Console
from fedsim.document import Code, Document, Items, Quote, Section, Table, to_html, to_markdown
from fedsim.files import read_json, write_atomically
from fedsim.plan import ADJACENCY, Plan
from fedsim.svg import Chart, Series
from fedsim.verify import Check, verify

HTML, MARKDOWN = "report.html", "report.md"
CURVE_POINTS = 25
STEP_POINTS = 16
FALSE_ALARMS = (0.001, 0.01, 0.05)
NEEDED = ("settings", "ledger", "events", "epsilon", "summary", "checkpoints")


class ReportError(FedsimError):
    """The run makes no claim that could be reported."""


@dataclasses.dataclass(frozen=True)
class Released:
    """What a run has released, from its ledger."""

    run_dir: Path
    stored: dict[str, Any]
    plan: Plan
    lines: list[dict[str, Any]]
    phases: list[tuple[Event, int]] | None
    epsilon: float
    checks: list[Check]

    @property
    def num_steps(self) -> int:
        """Steps released."""
        return len(self.lines) - 1

    @property
    def comparison_only(self) -> bool:
        """Whether other sampling was run than was accounted."""
        return self.plan.sampling_run != self.plan.sampling_accounted

    @property
    def label(self) -> str:
        """What makes epsilon no guarantee; empty where it is one."""
        return "" if self.plan.epsilon_holds == ADJACENCY else self.plan.epsilon_holds

    @property
    def fingerprint(self) -> str:
        """sha256 of the newest checkpoint's parameters."""
        newest = checkpoint.latest(self.run_dir)
        return "none yet" if newest is None else params_sha256(newest)


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`.

    Raises: ConfigError: there is no run. ReportError: it is not what its ledger says.
    """
    checks = verify(run_dir, console=console)
    for check in checks:
        if check.holds is False and check.promise in NEEDED:
            raise ReportError(f"nothing to report: {check.promise} violated: {check.found}")
    stored, lines = rundir.load(run_dir), ledger.read(run_dir)
    plan = Plan.from_dict(stored["plan"])
    phases = ledger.phases(lines)
    epsilon = ledger.epsilon_of(phases, plan.delta)
    released = Released(run_dir, stored, plan, lines, phases, epsilon, checks)
    document = compose(released)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / HTML, to_html(document).encode())
    write_atomically(out / MARKDOWN, to_markdown(document).encode())
    return {
        "run_dir": str(run_dir),
        "html": str(out / HTML),
        "markdown": str(out / MARKDOWN),
        "epsilon": "inf" if math.isinf(epsilon) else epsilon,
        "delta": plan.delta,
        "claim": claim(released),
    }


def compose(released: Released) -> Document:
    """The report's sections."""
    sections = [
        Section("The claim", [Quote(claim(released)), *_in_words(released)]),
        Section("What was done, item by item", [_items(released)]),
    ]
    if released.phases is not None and released.num_steps:
        sections.append(Section("The whole trade-off", _charts(released)))
    sections += [
        Section("What the guarantee does not cover", _outside(released)),
        Section("Was it checked?", _checked(released.checks)),
        Section("Settings and results", [_settings(released)]),
        Section("Fingerprints and versions", [_fingerprints(released)]),
        Section("How to verify this yourself", _commands(released)),
        Section("Words", [WORDS]),
    ]
    return Document(f"Privacy report: {released.run_dir.resolve().name}", sections)


def claim(released: Released) -> str:
    """One sentence that can be quoted."""
    plan = released.plan
    model = f"The model with SHA-256 fingerprint {released.fingerprint}"
    trained = f"was trained on {plan.num_examples:,} texts of {plan.num_users:,} people"
    if released.phases is None:
        return f"{model} {trained} without noise, so that no privacy is claimed for anyone."
    if released.label:
        order = "in shuffled order" if released.comparison_only else "taken for a sample of more"
        return (
            f"{model} {trained} {order}, for which no privacy is claimed: "
            f"epsilon = {_up(released.epsilon)} is {released.label}."
        )
    known = any(fact.startswith("the seed") for fact in plan.non_private)
    proviso = ", towards whoever does not know the seed of this reproduction" if known else ""
    return (
        f"{model} {trained} with user-level differential privacy of epsilon = "
        f"{_up(released.epsilon)} and delta = {plan.delta:.2e}{proviso}: for every one of these "
        "people, whatever they wrote and whatever else is known, including all of their texts in "
        "the training instead of leaving all of them out makes no outcome of it more than "
        f"{_factor(released.epsilon)} times as likely, nor as unlikely, give or take a "
        f"probability of {plan.delta:.2e}."
    )


def _up(epsilon: float) -> str:
    """An upper bound is rounded up."""
    return f"{math.ceil(epsilon * 1e4 - 1e-7) / 1e4:.4f}"


def _factor(epsilon: float) -> str:
    factor = math.exp(min(epsilon, 700))
    return f"{math.ceil(factor * 100) / 100:,.2f}" if factor < 1e6 else f"{factor:.2e}"


def _in_words(released: Released) -> list[Any]:
    """What the claim means to someone who might be recognised."""
    if released.phases is None or released.comparison_only or not released.num_steps:
        return []
    rows = [
        (f"{alarm:.1%} of those who did not", f"at most {most_recognised(released, alarm):.1%}")
        for alarm in FALSE_ALARMS
    ]
    return [
        "In other words: suppose someone has the finished model, and even the model after every "
        "single step, and wants to find out whether a certain person's texts were used. Whatever "
        "their method, their computers and their knowledge of everybody else, this is the most "
        "that they can achieve:",
        Table(("who wrongly suspects", "recognises, of those who took part"), rows),
        "The guarantee covers the whole of what a person wrote, not one text at a time, and it "
        "does not weaken when the model is copied, published or trained further on other data.",
    ]


def most_recognised(released: Released, false_alarms: float) -> float:
    """The highest true positive rate of any test at a false positive rate, by the whole curve.

    Every (epsilon, delta) that holds bounds it: by e^epsilon f + delta, and from the other side by
    1 - e^-epsilon (1 - delta - f). Source: Kairouz et al. 2015, Theorem 2.1.
    """
    epsilons, deltas = curve(released)
    above = np.exp(epsilons) * false_alarms + deltas
    below = 1 - np.exp(-epsilons) * np.maximum(0, 1 - deltas - false_alarms)
    return float(min(1.0, above.min(), below.min()))


def curve(released: Released) -> tuple[np.ndarray, np.ndarray]:
    """(epsilons, deltas) of all that was released."""
    assert released.phases is not None
    epsilons = np.linspace(0, 1.3 * released.epsilon, CURVE_POINTS)
    return epsilons, accounting.privacy_curve(released.phases, epsilons)


def over_steps(released: Released) -> tuple[list[int], list[float]]:
    """Epsilon after some of the steps."""
    *before, (event, count) = released.phases or []
    if not isinstance(event, StepEvent):
        return [], []
    running = RunningEpsilon(event, released.plan.delta, before)
    steps = sorted({round(i * count / STEP_POINTS) for i in range(STEP_POINTS + 1)})
    return steps, [running(step) for step in steps]


def _charts(released: Released) -> list[Any]:
    epsilons, deltas = curve(released)
    label = f" ({released.label})" if released.label else ""
    steps, spent = over_steps(released)
    target = released.plan.target_epsilon
    blocks: list[Any] = [
        "A guarantee is not one pair of numbers but a curve: the model has all of these pairs at "
        f"once. The claim quotes the one at delta = {released.plan.delta:.2e}{label}.",
        Chart(
            f"Delta at each epsilon, after {released.num_steps} steps{label}",
            "epsilon",
            "delta (logarithmic)",
            [Series("delta", epsilons.tolist(), deltas.tolist())],
            log_y=True,
        ),
    ]
    if len(steps) > 1:
        goal = Series("asked for", [steps[0], steps[-1]], [target, target], dashed=True)
        title = f"Epsilon after each step, at delta = {released.plan.delta:.2e}{label}"
        lines = [Series("released", steps, spent), goal]
        blocks.append(Chart(title, "steps", "epsilon", lines))
    return blocks


def _items(released: Released) -> Table:
    """The reporting list of Ponomareva et al. 2023, Section 5.3.3."""
    plan = released.plan
    els = plan.algorithm == Algorithm.ELS
    unit = "text" if els else "person"
    name = "DP-SGD-ELS (Algorithm 1)" if els else "DP-SGD-ULS (Algorithm 2)"
    if plan.adaptive:
        name += ", with a clip norm that follows a quantile of the norms privately"
    prob = f"{plan.accounted_prob:.4g}"
    law = (
        f"a mixture of Gaussians, Binomial({plan.group_size}, {prob}) (Theorem 1)"
        if els
        else f"a Gaussian, sampled with probability {prob} (Theorem 2)"
    )
    same = f"no: {released.label}" if released.label else "yes"
    noise = "none" if released.phases is None else f"{plan.noise_multiplier:.6g}"
    epsilon = _up(released.epsilon) if released.phases is not None else "infinite: no noise"
    tuning = [fact for fact in plan.non_private if "chosen by looking" in fact]
    share = plan.group_size_epsilon
    before = "nothing" if share is None else f"choosing the group size: {share:g} of epsilon"
    rows = [
        ("setting", "central: whoever trains sees the texts; others see what is released"),
        ("who is protected (unit of privacy)", "a user, with all of their texts"),
        ("adjacency", "data sets that differ by all texts of one user, added or removed"),
        ("released, hence covered", "the parameters after every step, and the ledger"),
        ("mechanism", f"{name} of Charles et al. 2024: the Gaussian mechanism on a clipped sum"),
        ("clipping", f"{plan.clipping}, of each {unit}'s gradient, to {plan.clip_norm:g}"),
        ("noise multiplier", noise),
        ("texts of a person", _cap(plan)),
        ("divided by", f"{plan.expected_count}, the expected number, whatever was drawn"),
        ("epsilon, delta", f"{epsilon}, {plan.delta:.3e}"),
        ("steps accounted", f"{released.num_steps} of {plan.num_steps} planned"),
        ("accountant", f"privacy loss distribution, upper bound; each step {law}"),
        ("sampling that was run", plan.sampling_run),
        ("sampling that was accounted", plan.sampling_accounted),
        ("are the two the same", same),
        ("accounted before training", before),
        ("tuning of settings", "; ".join(tuning) or "none reported; none is accounted"),
        ("other runs on these data", "not accounted: their epsilons add up with this one's"),
    ]
    return Table(("item", "this run"), rows)


def _cap(plan: Plan) -> str:
    if plan.algorithm == Algorithm.ELS:
        return f"at most {plan.group_size} in all of the training, drawn once"
    return f"at most {plan.group_size} in a step, whose mean gradient is clipped as one"


def _outside(released: Released) -> list[Any]:
    facts = list(released.plan.non_private)
    return [
        "The guarantee is about the released model and ledger. These are computed from the "
        "people's texts without protection, or known to others:",
        Items(
            [
                *facts,
                "metrics named `non_private/…` (training loss, norms, sizes of draws), loss on "
                "held-back texts of training users, and the times that steps took: not to be "
                "published",
                "the secret key (`secret.json`), and whatever else the driver and the workers "
                "hold: whoever can read that can read the texts",
                "texts that several people share: each person is protected for their own copy",
            ]
        ),
        "About the noise: it is drawn and added in 64-bit floating point and rounded once to 32 "
        "bits, from a pseudo-random generator (Philox, as the draws of people and texts) keyed "
        "with a secret. The mathematics assumes real numbers and perfect randomness. Attacks on "
        "the low bits of floating-point noise are known (Mironov 2012), and the generator is not a "
        "certified one. No more is claimed than that.",
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
    run = released.stored["run"]
    names = ("data", "model", "lora_rank", "optimizer", "learning_rate", "compute_dtype")
    rows += [(name, str(run.get(name))) for name in names[1:]]
    rows.insert(0, ("data", Path(run["data"]).name))
    rows.append(("strategy", str(released.stored.get("strategy", {}).get("name"))))
    path = released.run_dir / rundir.SUMMARY
    if path.exists():
        summary = read_json(path)
        names = ("initial_eval_loss", "final_eval_loss")
        rows += [(f"{name} (people not trained on)", f"{summary[name]}") for name in names]
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
        ("model trained from", str(released.stored["identity"].get("model") or "fresh parameters")),
        *((name, number) for name, number in released.stored["versions"].items()),
    ]
    return Table(("what", "value"), [(name, f"`{value}`") for name, value in rows])


def _commands(released: Released) -> list[Any]:
    plan, path = released.plan, shlex.quote(str(released.run_dir))
    lines = [f"fedsim verify {path}", f"fedsim verify {path} --replay"]
    if released.phases is not None:
        lines.append(
            f"fedsim account {plan.algorithm} --num-steps {released.num_steps} "
            f"--sampling-prob {plan.accounted_prob!r} --noise-multiplier {plan.noise_multiplier!r} "
            f"--group-size {plan.group_size} --delta {plan.delta!r}"
        )
    return [
        "The first replays the ledger. The second also computes the last steps again from the key "
        "and the data, and compares every bit. The third computes epsilon from the public "
        "constants alone. What an attacker really achieves is measured by `fedsim audit`.",
        Code("\n".join(lines)),
    ]


def params_sha256(path: Path) -> str:
    """Of a checkpoint's parameters."""
    return checkpoint.params_sha256(checkpoint.load_params(path))


WORDS = Table(
    ("word", "meaning"),
    [
        (
            "epsilon",
            "How much one person can change the odds of anything: by a factor of e^epsilon. "
            "Smaller is more private: 0 is perfect, and beyond 10 or so it says little.",
        ),
        (
            "delta",
            "The small probability that is set aside. It should be well below one in the number "
            "of people.",
        ),
        ("user", "A person, or whatever owns texts in these data: an account, a site, an author."),
        ("gradient", "The direction in which a text, or a person's texts, pull the model."),
        ("clipping", "Shortening every pull to a fixed length, so that nobody pulls harder."),
        ("noise", "A random change added to the sum of all pulls, large enough to hide any one."),
        ("sampling", "Only some take part in each step, by lot, which hides who did."),
        ("ledger", "The list of everything that was released, from which epsilon is computed."),
    ],
)
