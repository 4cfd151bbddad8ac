"""Plan, progress and results of a run for a person, on stderr."""

import math
import shlex
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fedsim.accounting import at_least, at_most
from fedsim.config import Algorithm, RunConfig
from fedsim.data import NATS_PER_TOKEN
from fedsim.plan import ALL_COVERED, Plan, in_words
from fedsim.run.metrics import BOARD
from fedsim.run.terminal import Terminal, time_in_words

SHOWN = {
    "privacy/epsilon": "epsilon",
    "eval/loss": "held-out loss",
    "non_private/loss": "train loss",
}
"""Names of metrics in a step's line, the most important first."""
MAX_LINES = 10  # about steps in the log of a run
USUAL = 20  # steps that say how long the next one takes
SLOW_S = 10.0  # of a step, from which on one tells the rest; else two do
LONG_S = 60.0  # of which a log says how many minutes they are

Show = Callable[[int, dict[str, float], float], None]


def line(values: dict[str, float]) -> str:
    """The metrics of a step that have a value, each with its name."""
    parts = []
    for metric, name in SHOWN.items():
        if (value := values.get(metric)) is None or math.isnan(value):
            continue
        parts.append(f"{name} {at_most(value, '.4g') if name == 'epsilon' else f'{value:.4g}'}")
    return "  ".join(parts)


class Console(Terminal):
    """Shows a run to the person who started it, on stderr."""

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """Show pairs of name and value, one in each line."""
        for name, value in rows:
            self.note(f"{name:17} {value}")

    def plan(self, plan: Plan, workers: Any, run: RunConfig) -> None:
        """Show the plan, before the first step, and what its guarantee does not cover. Args: run:
        with the optimizer's defaults filled in."""
        self.rows(plan_rows(plan, workers, run))
        for fact in (*plan.caveats, *plan.assumptions):
            self.note(fact.line)
        outside = plan.caveats or plan.assumptions
        text = "" if outside else f"{ALL_COVERED} of model and ledger; "
        losses = "losses that are shown have" if plan.evaluations is None else "train loss has"
        self.note(f"{text}the {losses} no noise: not to be published")

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[Show]:
        """Show progress from step `first` to `last`; yield a function to call after each step.

        Its arguments: the step, its metrics, and the seconds that evaluations after it will take.
        """
        every, took = -(-(last - first) // MAX_LINES), deque(maxlen=USUAL)

        def show(step: int, values: dict[str, float], evaluations: float) -> None:
            if step > first + 1:  # the first step compiles
                took.append(values["performance/step_seconds"])
            usual, shown = statistics.median(took) if took else 0.0, line(values)
            left = usual * (last - step) + evaluations
            if update is not None:
                done = f"{step} of {last} steps{f', {time_in_words(left)} left' if took else ''}"
                update(completed=step, description=done, text=shown)
            elif step % every == 0 or step in (first + 1, last):
                self.note(f"step {step}/{last}  {shown}")
            enough = 1 if took and took[0] >= SLOW_S else 2
            if len(took) == enough and left > LONG_S:
                rest = f"the rest with evaluations {time_in_words(left)}"
                self.note(f"a step takes {usual:.2g} s, {rest}")

        begin = f"{first} of {last} steps, the next one compiles"
        bar = self.bar(begin, first, last) if self.has_bars else nullcontext()
        with bar as update:
            yield show

    def evaluated(self, values: dict[str, float]) -> None:
        """Show the losses before the first step."""
        self.note(f"before the first step  {line(values)}")

    def summary(self, summary: dict[str, Any], run_dir) -> None:
        """Show results, claim and directory of a run, and commands that go on from it."""
        losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
        unit = summary.get("loss_unit", NATS_PER_TOKEN)
        if all(map(math.isfinite, losses)):  # else it was stopped between two evaluations
            self.note(f"held-out loss {losses[0]:.4g} -> {losses[1]:.4g} {unit}")
        self.note(guarantee_line(summary))
        board = run_dir / BOARD
        look = f"; look at it with: tensorboard --logdir {shlex.quote(str(board))}"
        self.note(f"written to {run_dir}{look if board.exists() else ''}")
        commands = ["verify"]
        if summary["steps_done"]:  # and a unit if it is a language model
            commands += ["report", "generate"] if unit else ["report"]
        self.note("next: " + ", ".join(f"fedsim {x} {shlex.quote(str(run_dir))}" for x in commands))


def spent(summary: dict[str, Any]) -> float:
    """Epsilon of all planned steps, with the slack of noise that is not ideal.

    The slack of delta is apart, in the summary's `slack`; a report's claim has both in epsilon.
    """
    slack = summary.get("slack") or {"epsilon": 0.0}  # without noise there is none
    return float(summary["epsilon"]) + slack["epsilon"]


def guarantee_line(summary: dict[str, Any]) -> str:
    """The privacy claim in one line."""
    if summary["epsilon"] == "inf":
        return "non-private: trained without noise"
    epsilon = at_most(spent(summary), ".4f" if spent(summary) >= 0.1 else ".3g")
    delta = at_most(summary["delta"], ".2e")
    guarantee = f"epsilon {epsilon} at delta {delta}"
    if 0 < summary["steps_done"] < summary["num_steps"]:
        guarantee += f", what all {summary['num_steps']} planned steps cost"
    if (holds := summary["epsilon_holds"]) != summary["adjacency"]:
        return f"{guarantee}: no guarantee: {in_words(holds)}"
    return f"user-level DP: {guarantee}; neighbours: {holds}"


def plan_rows(plan: Plan, workers: Any, run: RunConfig) -> list[tuple[str, str]]:
    """Names and values that describe a run to a person, before its first step."""
    unit = "example" if plan.algorithm == Algorithm.ELS else "user"
    prob, expected = at_least(plan.sampling.prob, ".3g"), f"{plan.expected_count:,} {unit}s"
    examples = "" if plan.num_examples is None else f", {plan.num_examples:,} examples"
    gradients = f"{plan.batch_size:,} gradients of {plan.num_parameters:,} parameters"
    drawn = f", drawn for epsilon {plan.group_size_epsilon:g}" if plan.group_size_epsilon else ""
    target = "infinite: no noise, so no privacy"
    if plan.noise_multiplier:
        label = f" ({plan.label})" if plan.label else ""
        target = f"{plan.target_epsilon:g} at delta {at_most(plan.delta, '.2e')}{label}"
    algorithm = f"DP-SGD-{plan.algorithm.upper()} with {plan.sampling.kind} sampling"
    step = f"{expected} on average, each with probability {prob}"
    if own := plan.own_algorithm:
        algorithm, step = (
            f"{own}, on DP-SGD-{plan.algorithm.upper()}",
            f"{unit}s as {own} draws them",
        )
    rows = [
        ("algorithm", algorithm),
        ("data", f"{plan.num_users:,} users{examples}"),
        ("step", step),
        ("group size", f"{plan.group_size:,}{drawn}"),
        ("epsilon", target),
        ("noise multiplier", at_most(plan.noise_multiplier, ".4f")),
        ("compute", f"{plan.num_steps:,} steps x {gradients}, learning rate {run.learning_rate:g}"),
    ]
    if workers is not None:
        cut = f"a step is cut in {workers.num_lanes} parts"
        rows.append(("workers", f"{workers.describe()}; {cut}"))
    if plan.guarantee:
        rows.insert(4, ("neighbours", plan.compared))
    return rows
