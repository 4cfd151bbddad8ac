"""Plan, progress and results of a run for a person, on stderr."""

import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.table import Column

from fedsim.accounting import at_least, at_most
from fedsim.config import ZERO_OUT, Algorithm, RunConfig
from fedsim.data import NATS_PER_TOKEN
from fedsim.plan import ALL_COVERED, PROTECTS, Evaluations, Plan, in_words
from fedsim.run.metrics import BOARD
from fedsim.run.terminal import Terminal, duration

SHOWN = {
    "privacy/epsilon": "epsilon",
    "eval/loss": "held-out loss",
    "non_private/loss": "train loss",
}
"""Names of metrics in a step's line, the most important first."""
SPEEDS = {
    "non_private/gradients_per_second": "gradients/s",
    "performance/tokens_per_second": "tokens/s",
}
"""Names of metrics that the line has only if the level is verbose."""
BAR = 10  # columns of the bar
EVALUATED = "eval/step"
"""Metric: the step after which the shown held-out loss was computed, as later steps may show it."""
MAX_LINES = 10  # about steps in the log of a run, unless the level is verbose
CLEARLY = 3 * 2**0.5  # times the noise of a loss: a difference of two beyond chance
EARLY = 3  # a log of many steps has a line after so many, to show how long the rest will take

Show = Callable[[int, dict[str, float]], None]


def line(values: dict[str, float], *, verbose: bool = False) -> str:
    """The metrics of a step that have a value, each with its name."""
    parts = []
    for metric, name in (SHOWN | SPEEDS if verbose else SHOWN).items():
        if (value := values.get(metric)) is None or math.isnan(value):
            continue
        shown = at_most(value, ".4g") if name == "epsilon" else f"{value:.4g}"
        of_step = f" (at step {values[EVALUATED]:g})" if EVALUATED in values else ""
        parts.append(f"{name} {shown}{of_step if metric == 'eval/loss' else ''}")
    return "  ".join(parts)


class Console(Terminal):
    """Shows a run to the person who started it, on stderr."""

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """Show pairs of name and value, one in each line."""
        for name, value in rows:
            self.note(f"{name:17} {value}", indent=18)

    def plan(self, plan: Plan, workers: Any, run: RunConfig) -> None:
        """Show the plan, before the first step, and what its guarantee does not cover.

        Args:
          workers: the engine.
          run: settings with the defaults of the recipe filled in.
        """
        self.rows(plan_rows(plan, workers, run))
        if plan.shared and plan.shared.left_out > plan.shared.kept:
            self.warn(
                "more than half of the texts are left out, by the bound on the texts of an owner: "
                "an owner of nearly all, such as a bot, is better left out of the data"
            )
        for fact in (*plan.caveats, *plan.assumptions):
            self.note(fact.line)
        if not plan.caveats:
            losses = "losses that are shown have" if plan.evaluations is None else "train loss has"
            text = f"{ALL_COVERED} of model and ledger"
            self.note(f"{text}; the {losses} no noise: not to be published")

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[Show]:
        """Show progress from step `first` to `last`; yield a function to call after each step."""
        if self._level == "quiet":
            yield lambda step, values: None
        elif self._out.is_terminal:
            columns = (
                "step",
                progress.MofNCompleteColumn(),
                progress.BarColumn(bar_width=BAR),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                progress.TextColumn(
                    "{task.fields[text]}",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis"),
                ),
            )
            with progress.Progress(*columns, console=self._out) as bar:
                task = bar.add_task("", total=last, completed=first, text="")
                self._show = lambda text: bar.update(task, text=text)
                try:
                    yield lambda step, values: bar.update(
                        task, completed=step, text=line(values, verbose=self.verbose)
                    )
                finally:
                    self._show = None
        else:
            yield self._in_lines(first, last)

    def _in_lines(self, first: int, last: int) -> Show:
        """Progress as lines of a log, with the time that is left."""
        every = 1 if self.verbose else -(-(last - first) // MAX_LINES)
        early = first + EARLY if every > EARLY else None
        begin: tuple[int, float] | None = None  # the first step compiles programs: not measured

        def show(step: int, values: dict[str, float]) -> None:
            nonlocal begin
            now, left = time.monotonic(), ""
            if begin is None:
                begin = step, now
            elif step < last:
                seconds = (now - begin[1]) / (step - begin[0]) * (last - step)
                left = f"  {duration(max(1.0, seconds))} left"
            if step % every == 0 or step in (early, last):
                self.note(f"step {step}/{last}  {line(values, verbose=self.verbose)}{left}")

        return show

    def summary(self, summary: dict[str, Any], run_dir) -> None:
        """Show results, claim and directory of a run."""
        losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
        is_evaluated = all(map(math.isfinite, losses))  # else it was stopped in between
        unit = summary.get("loss_unit", NATS_PER_TOKEN)
        noise = Evaluations(**how).stddev if (how := summary.get("evaluations")) else 0.0
        change = loss_in_words(*losses, unit=unit)
        if noise:  # of which a perplexity is no estimate
            change = f"{losses[0]:.4g} -> {losses[1]:.4g} {unit}, each with noise of {noise:.2g}"
        shown = f"held-out loss {change}; " if is_evaluated else ""
        self.note(
            f"{shown}{summary['steps_done']} steps, {summary['gradients_computed']:,} gradients, "
            f"{duration(max(1.0, summary['wall_seconds']))}"
        )
        if is_evaluated and losses[1] - losses[0] > CLEARLY * noise:
            self.warn(
                "the held-out loss rose: this model is worse than what it started from; "
                "a smaller learning_rate, a larger batch_size or more steps may do better"
            )
        self.note(guarantee_line(summary))
        board = run_dir / BOARD
        look = f"; look at it with: tensorboard --logdir {shlex.quote(str(board))}"
        self.note(f"written to {run_dir}{look if board.exists() else ''}")


def loss_in_words(*losses: float, unit: str) -> str:
    """A loss, or one before and one after, with unit and perplexity, if the loss has a unit."""
    shown = " -> ".join(f"{loss:.4g}" for loss in losses)
    perplexities = " -> ".join(f"{math.exp(min(loss, 700)):.3g}" for loss in losses)
    return f"{shown} {unit} (perplexity {perplexities})" if unit else shown


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
    epsilon, delta = at_most(spent(summary), ".4f"), at_most(summary["delta"], ".2e")
    guarantee = f"epsilon {epsilon} at delta {delta}"
    if 0 < summary["steps_done"] < summary["num_steps"]:
        guarantee += f", what all {summary['num_steps']} planned steps cost"
    if (holds := summary["epsilon_holds"]) != summary["adjacency"]:
        return f"{guarantee}: no guarantee: {in_words(holds)}"
    return f"user-level DP: {guarantee}; protects {PROTECTS.get(holds, holds)}"


def plan_rows(plan: Plan, workers: Any, run: RunConfig) -> list[tuple[str, str]]:
    """Names and values that describe a run to a person, before its first step; arguments as of
    `Console.plan`."""
    unit = "example" if plan.algorithm == Algorithm.ELS else "user"
    bands = plan.sampling.bands
    groups = f" from {bands} groups of users in turn" if bands > 1 else ""
    kind = plan.sampling.kind.replace("poisson", "Poisson")
    drawn = f"{unit}s are drawn by {kind} sampling{groups}"
    examples = "" if plan.num_examples is None else f", {plan.num_examples:,} examples"
    prob, expected = at_least(plan.sampling.prob, ".3g"), f"{plan.expected_count:,} {unit}s"
    return [
        ("algorithm", f"DP-SGD-{plan.algorithm.upper()}: {drawn}"),
        ("data", f"{plan.num_users:,} users{examples}"),
        *_shared_rows(plan),
        ("step", f"{expected} on average, each with probability {prob}"),
        ("per user", _per_user(plan)),
        *([("protects", PROTECTS[plan.compared])] if plan.guarantee else []),
        ("epsilon", _target(plan)),
        ("clipping", _clipping(plan, unit)),
        ("noise", _noise(plan)),
        *_evaluation_rows(plan),
        ("optimizer", _optimizer(run)),
        (
            "compute",
            f"{plan.num_steps:,} steps x {plan.budget:,} gradients of {plan.num_parameters:,} "
            "parameters",
        ),
        ("workers", f"{workers.describe()}; a step is cut in {workers.num_lanes} parts"),
    ]


def _per_user(plan: Plan) -> str:
    """The bound on a user's examples."""
    median = plan.group_size_epsilon
    chosen = f"; a private median, for epsilon {median:g} of it" if median else ""
    most = f"at most {plan.group_size:,} example{'s' if plan.group_size > 1 else ''}"
    if plan.algorithm == Algorithm.ULS:
        return f"{most} in a step{chosen}"
    empty = plan.adjacency == ZERO_OUT and plan.shared is None
    pool = f"{plan.num_units:,} {'places' if empty else 'examples'}"
    return f"{most} in the whole training (a pool of {pool}){chosen}"


def _target(plan: Plan) -> str:
    """The target epsilon, and the reason if it is no guarantee."""
    if not plan.noise_multiplier:
        return "infinite: no noise, so no privacy"
    label = f" ({plan.label})" if plan.label else ""
    return f"{plan.target_epsilon:g} at delta {at_most(plan.delta, '.2e')}{label}"


def _clipping(plan: Plan, unit: str) -> str:
    """The rule that bounds gradients."""
    moves = f", moved to quantile {plan.clip_quantile:g} privately" if plan.clip_quantile else ""
    limit = f"{plan.clip.sensitivity:g} at most (clip norm C = {plan.clip_norm:g}{moves})"
    return f"every {unit}'s gradient is scaled to norm {limit}"


def _noise(plan: Plan) -> str:
    """The noise of a step."""
    if not plan.noise_multiplier:
        return "none"
    stddev = plan.clip.sensitivity * plan.gradient_noise_multiplier / plan.expected_count
    bands = plan.noise.bands
    back = f", partly taken back in the next {bands - 1} steps" if bands > 1 else ""
    each = f"each coordinate of the average gradient gets noise of {at_most(stddev, '.2g')}{back}"
    return f"{each} (noise multiplier {at_most(plan.noise_multiplier, '.4f')})"


def _optimizer(run: RunConfig) -> str:
    """Optimizer, learning rate and average."""
    average = f", weights averaged (EMA {run.ema:g})" if run.ema else ""
    name = "SGD with momentum" if run.optimizer == "momentum" else run.optimizer
    schedule = "" if run.schedule == "constant" else f" with {run.schedule} decay"
    return f"{name}, learning rate {run.learning_rate:g}{schedule}{average}"


def _evaluation_rows(plan: Plan) -> list[tuple[str, str]]:
    """The row on evaluations with noise, if there are any."""
    if (how := plan.evaluations) is None:
        return []
    cost = f"epsilon {how.epsilon:g} at delta {at_most(how.delta, '.2e')} of held-out users"
    noise = f"noise of {at_most(how.stddev, '.2g')} nats per token"
    noise += f" on the loss of {how.num_users:,}"
    return [("evaluation", f"{how.count:,} times, {cost}; {noise}")]


def _shared_rows(plan: Plan) -> list[tuple[str, str]]:
    """The row on texts with several owners, if there are any."""
    if (shared := plan.shared) is None:
        return []
    several = f"{shared.with_several_owners:,} with several owners"
    groups = ""
    if plan.algorithm == Algorithm.ULS:
        groups = f"; a user in {shared.max_changed:,} groups of others at most"
    return [("texts", f"{several}; {shared.left_out:,} left out{groups}")]
