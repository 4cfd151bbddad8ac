"""Plan, progress and results of a run for a person, on stderr.

Bars and lines go to standard error, as a terminal or a log shows them.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedsim.accounting import at_least, at_most
from fedsim.config import Algorithm, RunConfig
from fedsim.data import NATS_PER_TOKEN
from fedsim.errors import printable
from fedsim.plan import ALL_COVERED, Plan, in_words
from fedsim.signals import raise_if_stopped

BAR = 10  # columns of the bar

_LEVEL: ContextVar[str] = ContextVar("level", default="normal")


@contextmanager
def verbosity(level: str) -> Iterator[None]:
    """Set the level of the terminals that are made in the block: quiet or normal."""
    before = _LEVEL.set(level)
    try:
        yield
    finally:
        _LEVEL.reset(before)


class _Stderr:
    """The current sys.stderr. Failed writes are ignored: a closed pipe or a full disk must not end
    a run."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # none, or closed
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return sys.stderr.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class Terminal:
    """Warnings, notes and phases on stderr, at the level of the enclosing `verbosity`."""

    def __init__(self):
        # rich would make a separate output of every line in a notebook, which sets FORCE_COLOR.
        file = cast(TextIO, _Stderr())
        where: dict[str, Any] = {"force_jupyter": False, "force_terminal": file.isatty()}
        self._out = RichConsole(file=file, highlight=False, emoji=False, **where)
        self._level = _LEVEL.get()
        self._bar: Progress | None = None

    @property
    def has_bars(self) -> bool:
        """True if progress is a line that is overwritten; else it is lines of a log, or none."""
        return self._out.is_terminal and self._level != "quiet"

    def warn(self, text: str) -> None:
        """Write a warning, at every level."""
        self._write(f"warning: {text}")

    def note(self, text: str) -> None:
        """Write a line, unless the level is quiet."""
        if self._level != "quiet":
            self._write(text)

    def _write(self, text: str) -> None:
        """Write a line; control characters are escaped."""
        self._out.print(printable(text), markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, first: int = 0, last: int | None = None) -> Iterator[Callable]:
        """Show a line of progress on a terminal; yield `rich.progress.Progress.update` for it."""
        outer, of_text = self._bar, Column(no_wrap=True, overflow="ellipsis")
        self._bar = outer or Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}", markup=False, table_column=of_text),
            console=self._out,
            transient=True,
        )
        with nullcontext() if outer else self._bar:
            task = self._bar.add_task(what, total=last, completed=first, text="")
            try:
                yield functools.partial(self._bar.update, task)
            finally:
                self._bar.remove_task(task)
                self._bar = outer

    @contextmanager
    def phase(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show an operation on a terminal while the block runs.

        Yields:
          (done, of) -> None; reports progress. Raises KeyboardInterrupt if a stop signal came.
        """
        what = printable(what)
        with self.bar(what) if self.has_bars else nullcontext() as update:

            def at(done: int, of: int) -> None:
                raise_if_stopped()
                if update is not None:
                    line = f"{what}: {done} of {of} done" if of else f"{what}: {done} done"
                    update(completed=done, total=of or None, description=line)

            yield at


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; control characters are escaped."""
    shown = [[printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in shown
    ]


SHOWN = {
    "privacy/epsilon": "epsilon",
    "eval/loss": "held-out loss",
    "non_private/loss": "train loss",
}
"""Names of metrics in a step's line, the most important first."""
MAX_LINES = 10  # about steps in the log of a run

Show = Callable[[int, dict[str, float]], None]


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
        if not plan.caveats:
            losses = "losses that are shown have" if plan.evaluations is None else "train loss has"
            text = f"{ALL_COVERED} of model and ledger"
            self.note(f"{text}; the {losses} no noise: not to be published")

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[Show]:
        """Show progress from step `first` to `last`; yield a function to call after each step."""
        if self.has_bars:
            with self.bar("step", first, last) as update:
                yield lambda step, values: update(
                    completed=step,
                    description=f"step {step}/{last}",
                    text=line(values),
                )
            return
        every = -(-(last - first) // MAX_LINES)

        def show(step: int, values: dict[str, float]) -> None:
            if step % every == 0 or step == last:
                self.note(f"step {step}/{last}  {line(values)}")

        yield show

    def summary(self, summary: dict[str, Any], run_dir) -> None:
        """Show results, claim and directory of a run."""
        losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
        unit = summary.get("loss_unit", NATS_PER_TOKEN)
        if all(map(math.isfinite, losses)):  # else it was stopped between two evaluations
            self.note(f"held-out loss {losses[0]:.4g} -> {losses[1]:.4g} {unit}")
        self.note(guarantee_line(summary))
        self.note(f"written to {run_dir}")


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
    rows = [
        ("algorithm", f"DP-SGD-{plan.algorithm.upper()} with {plan.sampling.kind} sampling"),
        ("data", f"{plan.num_users:,} users{examples}"),
        ("step", f"{expected} on average, each with probability {prob}"),
        ("group size", f"{plan.group_size:,}{drawn}"),
        ("epsilon", target),
        ("noise multiplier", at_most(plan.noise_multiplier, ".4f")),
        ("compute", f"{plan.num_steps:,} steps x {gradients}, learning rate {run.learning_rate:g}"),
        ("workers", f"{workers.describe()}; a step is cut in {workers.num_lanes} parts"),
    ]
    if plan.guarantee:
        rows.insert(4, ("neighbours", plan.compared))
    return rows
