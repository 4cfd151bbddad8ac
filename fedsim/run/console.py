"""What a person sees of a run: the plan, progress, the outcome. Everything goes to stderr.

A progress bar on a terminal and in a notebook, one plain line per reporting interval otherwise (job
logs).
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress

from fedsim.accounting.rounding import at_least, at_most
from fedsim.config import ZERO_OUT, Algorithm, RunConfig
from fedsim.noise.bands import predicted_error
from fedsim.plan import Plan, label_of
from fedsim.run.terminal import Terminal


class Console(Terminal):
    """Writes to stderr."""

    def __init__(self, *, log_every: int = 10):
        super().__init__()
        self._log_every = log_every

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """Names and values."""
        for name, value in rows:
            self.note(f"{name:17} {value}")

    def plan(self, plan: Plan, workers: Any) -> None:
        """The plan, before the first step."""
        self.rows(plan_rows(plan, workers))
        for fact in plan.non_private:
            self.note(f"not covered by the guarantee: {fact}")

    def update(self, run: RunConfig) -> None:
        """What is done with a privatised gradient. Args: run: settled; see `recipe`."""
        average = f", average of {run.ema:g}" if run.ema else ""
        rate = f"{run.schedule} learning rate {run.learning_rate:g}"
        self.note(f"{'update':17} {run.optimizer}, {rate}{average}")

    @contextmanager
    def steps(self, first: int, plan: Plan) -> Iterator[Callable[[int, dict[str, float]], None]]:
        """Progress over the steps; call what it yields after each with its metrics."""
        if not self._out.is_terminal:
            show = _notebook_bar if in_notebook() else self._lines
            yield show(first, plan.num_steps)
            return
        columns = [
            "step",
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=10),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            "{task.description}",
        ]
        with progress.Progress(*columns, console=self._out) as bar:
            task = bar.add_task("", total=plan.num_steps, completed=first)
            self._show = lambda text: bar.update(task, description=text)
            try:
                yield lambda step, values: bar.update(
                    task, completed=step, description=line(values)
                )
            finally:
                self._show = None

    def _lines(self, first: int, last: int) -> Callable[[int, dict[str, float]], None]:
        started = time.monotonic()

        def show(step: int, values: dict[str, float]) -> None:
            if step % self._log_every == 0 or step in (first + 3, last):
                left = (time.monotonic() - started) / (step - first) * (last - step)
                self.note(f"step {step}/{last}  {line(values)}  left {left:.0f} s")

        return show

    def summary(self, summary: dict[str, Any], run_dir) -> None:
        """What came out."""
        losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
        found = all(map(math.isfinite, losses))  # not of a run that was stopped in between
        shown = "eval loss {:.4g} -> {:.4g} nats/token, ".format(*losses) if found else ""
        self.note(
            f"{shown}{summary['steps_done']} steps, {summary['gradients_computed']} gradients, "
            f"{summary['wall_seconds']:.0f} s"
        )
        self.note(guarantee_line(summary))
        self.note(f"written to {run_dir}; look at it with: tensorboard --logdir {run_dir}/tb")


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and hasattr(sys.stderr, "pub_thread")


def _notebook_bar(first: int, last: int) -> Callable[[int, dict[str, float]], None]:
    """One line of the cell's output that is written over after every step."""
    started = time.monotonic()

    def show(step: int, values: dict[str, float]) -> None:
        done = round(20 * step / last)
        left = (time.monotonic() - started) / (step - first) * (last - step)
        bar = f"{'█' * done}{'░' * (20 - done)} {step}/{last}  {line(values)}  left {left:.0f} s"
        end = "\n" if step == last else ""
        print(f"\r{bar:120}", end=end, file=sys.stderr, flush=True)

    return show


def guarantee_line(summary: dict[str, Any]) -> str:
    """The privacy claim in one line."""
    if summary["epsilon"] == "inf":
        return "non-private: trained without noise"
    epsilon, delta = at_most(summary["epsilon"], ".4f"), at_most(summary["delta"], ".2e")
    guarantee = f"epsilon {epsilon} at delta {delta}"
    if label := label_of(summary):
        return f"{guarantee}: {label}"
    return f"user-level DP: {guarantee} ({summary['adjacency']})"


def plan_rows(plan: Plan, workers: Any) -> list[tuple[str, str]]:
    """Names and values of the plan as a person wants to read them."""
    els = plan.algorithm == Algorithm.ELS
    unit, share = ("examples", "in all") if els else ("users", "each")
    empty = plan.adjacency == ZERO_OUT and plan.shared is None
    what = "places" if empty else "examples"
    pool = f", {plan.num_units:,} {what} in the pool" if els else ""
    label = f" ({plan.label})" if plan.label else ""
    if plan.noise_multiplier:
        epsilon = f"{plan.target_epsilon:g} at delta {at_most(plan.delta, '.2e')}{label}"
    else:
        epsilon = "inf: no noise, non-private"
    median = plan.group_size_epsilon
    chosen = f"; a private median, for epsilon {median:g} of it" if median else ""
    moves = f", moved to quantile {plan.clip_quantile:g} privately" if plan.clip_quantile else ""
    rows = ""
    if plan.strategy:
        least = predicted_error(plan.noise_multiplier, plan.num_steps, 1)
        size = plan.strategy.bytes_per_number * plan.num_parameters / 1e6
        rows = (
            f" ({plan.predicted_error / least:.3g} times that of independent noise of this "
            f"multiplier); rows of {plan.bands - 1} steps take {size:,.3g} MB of the driver"
        )
    groups = f", {plan.bands} groups of users in turn" if plan.bands > 1 else ""
    compute = f"{plan.num_steps:,} steps x {plan.budget:,} gradients"
    return [
        ("algorithm", f"DP-SGD-{plan.algorithm.upper()}, {plan.sampling_run} sampling{groups}"),
        ("data", f"{plan.num_users:,} users, {plan.num_examples:,} examples{pool}"),
        *shared_rows(plan),
        (
            "step",
            f"{plan.expected_count:,} {unit} expected, with probability "
            f"{at_least(plan.sampling_prob, '.3g')}",
        ),
        ("group size", f"{plan.group_size:,} of a user's examples {share} at most{chosen}"),
        ("adjacency", plan.compared),
        ("clipping", f"{plan.clipping}, C = {plan.clip_norm:g}{moves}"),
        ("epsilon", epsilon),
        ("noise multiplier", at_most(plan.noise_multiplier, ".4f")),
        ("noise", f"{plan.noise}, {plan.predicted_error:.4g} on sums of gradients{rows}"),
        ("compute", f"{compute}, {plan.num_parameters:,} parameters"),
        ("workers", f"{workers.num_workers} x {workers.describe()}; {workers.num_lanes} lanes"),
    ]


def shared_rows(plan: Plan) -> list[tuple[str, str]]:
    """What became of texts with several owners, where there are."""
    if (shared := plan.shared) is None:
        return []
    several = f"{shared['with_several_owners']:,} with several owners"
    groups = ""
    if plan.algorithm == Algorithm.ULS:
        groups = f"; a user in {shared['max_changed']:,} groups of others at most"
    return [("texts", f"{several}; {shared['left_out']:,} left out{groups}")]


def line(values: dict[str, float]) -> str:
    """Metrics of a step in one line."""
    shown = {
        "loss (non-private)": values.get("non_private/loss"),
        "eval loss": values["eval/loss"],
        "epsilon": values.get("privacy/epsilon"),
        "epsilon as if Poisson sampled": values.get("comparison_only/epsilon_as_if_poisson"),
        "epsilon of an assumed population": values.get(
            "comparison_only/epsilon_of_assumed_population"
        ),
        "gradients/s": values["non_private/gradients_per_second"],
    }
    known = {name: value for name, value in shown.items() if value is not None and value == value}
    return "  ".join(f"{name} {_number(value)}" for name, value in known.items())


def _number(value: float | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value or "-")
