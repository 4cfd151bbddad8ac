"""Plan, progress and results of a run for a person, on stderr; and a table of all runs."""

import itertools
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console as RichConsole
from rich.text import Text

from fedsim.accounting import at_least, at_most
from fedsim.config import ZERO_OUT, Algorithm, RunConfig, settings_of
from fedsim.errors import FedsimError
from fedsim.files import read_json
from fedsim.noise import predicted_error
from fedsim.plan import Plan
from fedsim.run import directory, ledger, metrics
from fedsim.run.directory import Busy, StoredRun
from fedsim.run.terminal import Terminal, aligned

SHOWN = {
    "privacy/epsilon": "epsilon",
    "comparison_only/epsilon_as_if_poisson": "epsilon as if Poisson sampled",
    "comparison_only/epsilon_of_assumed_population": "epsilon of an assumed population",
    "eval/loss": "eval loss",
    "non_private/loss": "loss (non-private)",
    "non_private/gradients_per_second": "gradients/s",
    "performance/tokens_per_second": "tokens/s",
}
"""Names of metrics in a step's line, the most important first."""
BAR, WITH_BAR = 10, 80  # columns of the bar, and of the narrowest terminal that shows it
EVALUATED = "eval/step"
"""Metric: the step after which the shown held-out loss was computed, as later steps may show it."""
QUIET_S = 10.0  # longest time between two lines about steps in a log

Show = Callable[[int, dict[str, float]], None]


def items(values: dict[str, float]) -> list[str]:
    """The metrics of a step that have a value, each with its name."""
    named = {name: values.get(metric) for metric, name in SHOWN.items()}
    present = {n: v for n, v in named.items() if v is not None and not math.isnan(v)}
    of_step = f" after step {values[EVALUATED]:g}" if EVALUATED in values else ""
    suffixes = {SHOWN["eval/loss"]: of_step}
    return [
        f"{name} {_shown(name, value)}{suffixes.get(name, '')}" for name, value in present.items()
    ]


def _shown(name: str, value: float) -> str:
    """Four digits; an epsilon is rounded up."""
    return at_most(value, ".4g") if "epsilon" in name else f"{value:.4g}"


def line(values: dict[str, float]) -> str:
    """Metrics of a step in one line."""
    return "  ".join(items(values))


def fitted(parts: list[str], width: int) -> str:
    """As many parts as fit into `width` columns, at least the first."""
    longer = list(itertools.accumulate(parts, "{}  {}".format))
    return next((text for text in reversed(longer) if len(text) <= width), "".join(parts[:1]))


@contextmanager
def on_terminal(
    out: RichConsole, first: int, last: int
) -> Iterator[tuple[Show, Callable[[str], None]]]:
    """Progress bar on a terminal. Yields (show a step, show a text in its place)."""
    digits = 2 * len(str(last)) + len("/")
    taken = len("step ") + digits + len(" 0:00:00 ")
    with_bar = out.width >= WITH_BAR
    columns = [
        "step",
        progress.MofNCompleteColumn(),
        *([progress.BarColumn(bar_width=BAR)] if with_bar else []),
        progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        _Fitted(lambda: out.width - taken - with_bar * (BAR + 1)),
    ]
    with progress.Progress(*columns, console=out) as bar:
        task = bar.add_task("", total=last, completed=first, parts=[])
        yield (
            lambda step, values: bar.update(task, completed=step, parts=items(values)),
            lambda text: bar.update(task, parts=[text]),
        )


class _Fitted(progress.ProgressColumn):
    def __init__(self, room: Callable[[], int]):
        super().__init__()
        self._room = room

    def render(self, task: progress.Task) -> Text:
        text = fitted(task.fields["parts"], self._room())
        return Text(text, no_wrap=True, overflow="ellipsis")


def in_lines(note: Callable[[str], None], first: int, last: int, every: int) -> Show:
    """Progress as lines of a log: after every `every` steps, and at least every QUIET_S."""
    started = shown = time.monotonic()

    def show(step: int, values: dict[str, float]) -> None:
        nonlocal shown
        now = time.monotonic()
        if step == first + 1:  # the first step compiles, and shows that
            shown = now
        if step % every == 0 or step in (first + 3, last) or now - shown >= QUIET_S:
            left = (now - started) / (step - first) * (last - step)
            note(f"step {step}/{last}  {line(values)}  left {left:.0f} s")
            shown = now

    return show


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and hasattr(sys.stderr, "pub_thread")


def notebook_bar(first: int, last: int) -> Show:
    """Progress bar in a notebook: one line that is overwritten after every step."""
    started = time.monotonic()

    def show(step: int, values: dict[str, float]) -> None:
        done = round(20 * step / last)
        left = (time.monotonic() - started) / (step - first) * (last - step)
        bar = f"{'█' * done}{'░' * (20 - done)} {step}/{last}  {line(values)}  left {left:.0f} s"
        end = "\n" if step == last else ""
        print(f"\r{bar:120}", end=end, file=sys.stderr, flush=True)

    return show


class Console(Terminal):
    """Shows a run to the person who started it, on stderr."""

    def __init__(self, *, log_every: int = 10, quiet: bool = False):
        super().__init__(quiet=quiet)
        self._log_every = log_every

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """Show pairs of name and value, one in each line."""
        for name, value in rows:
            self.note(f"{name:17} {value}", indent=18)

    def plan(self, plan: Plan, workers: Any) -> None:
        """Show the plan, before the first step, and what its guarantee does not cover."""
        self.rows(plan_rows(plan, workers))
        for fact in plan.non_private:
            self.note(f"not covered by the guarantee: {fact}")

    def update(self, run: RunConfig) -> None:
        """Show optimizer, learning rate and average.

        Args:
          run: settings with the defaults of the recipe filled in.
        """
        average = f", average of {run.ema:g}" if run.ema else ""
        rate = f"{run.schedule} learning rate {run.learning_rate:g}"
        self.rows([("update", f"{run.optimizer}, {rate}{average}")])

    @contextmanager
    def steps(self, first: int, last: int) -> Iterator[Show]:
        """Show progress over the steps.

        Args:
          first: number of steps that were done before.
          last: number of all steps.

        Yields:
          A function to call after each step, with its number and metrics.
        """
        if not self._out.is_terminal:
            if in_notebook() and not self._out.quiet:
                yield notebook_bar(first, last)
            else:
                yield in_lines(self.note, first, last, self._log_every)
            return
        with on_terminal(self._out, first, last) as (show, self._show):
            try:
                yield show
            finally:
                self._show = None

    def summary(self, summary: dict[str, Any], run_dir) -> None:
        """Show results, claim and directory of a run."""
        losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
        is_evaluated = all(map(math.isfinite, losses))  # else it was stopped in between
        shown = "eval loss {:.4g} -> {:.4g} nats/token, ".format(*losses) if is_evaluated else ""
        self.note(
            f"{shown}{summary['steps_done']} steps, {summary['gradients_computed']} gradients, "
            f"{summary['wall_seconds']:.0f} s"
        )
        if is_evaluated and losses[1] > losses[0]:
            self.note(
                "warning: the held-out loss rose: this model is worse than what it started from; "
                "a smaller --learning-rate, a larger --batch-size or more steps may do better"
            )
        self.note(guarantee_line(summary))
        board = shlex.quote(f"{run_dir}/tb")
        self.note(f"written to {run_dir}; look at it with: tensorboard --logdir {board}")


def spent(summary: dict[str, Any]) -> float:
    """Epsilon of all planned steps, with the slack of noise that is not ideal.

    The slack of delta is apart, in the summary's `slack`; a report's claim has both in epsilon.
    """
    slack = summary.get("slack") or {"epsilon": 0.0}  # pre-training has none
    return float(summary["epsilon"]) + slack["epsilon"]


def guarantee_line(summary: dict[str, Any]) -> str:
    """The privacy claim in one line."""
    if summary["epsilon"] == "inf":
        return "non-private: trained without noise"
    epsilon, delta = at_most(spent(summary), ".4f"), at_most(summary["delta"], ".2e")
    guarantee = f"epsilon {epsilon} at delta {delta}"
    if 0 < summary["steps_done"] < summary["num_steps"]:
        guarantee += f", what all {summary['num_steps']} planned steps cost"
    if (label := summary["epsilon_holds"]) != summary["adjacency"]:
        return f"{guarantee}: {label}"
    return f"user-level DP: {guarantee} ({label})"


def plan_rows(plan: Plan, workers: Any) -> list[tuple[str, str]]:
    """Names and values that describe a plan to a person."""
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
    noise, bands, error = plan.noise.kind, plan.sampling.bands, plan.noise.predicted_error
    on_sums = "" if error is None else f", {error:.4g} on sums of gradients"
    rows = ""
    if error is not None and plan.strategy:
        least = predicted_error(plan.noise_multiplier, plan.num_steps, 1)
        size = plan.strategy.bytes_per_number * plan.num_parameters / 1e6
        rows = (
            f" ({error / least:.3g} times that of independent noise of this "
            f"multiplier); rows of {plan.noise.bands - 1} steps take {size:,.3g} MB of the driver"
        )
    groups = f", {bands} groups of users in turn" if bands > 1 else ""
    compute = f"{plan.num_steps:,} steps x {plan.budget:,} gradients"
    return [
        ("algorithm", f"DP-SGD-{plan.algorithm.upper()}, {plan.sampling.kind} sampling{groups}"),
        ("data", f"{plan.num_users:,} users, {plan.num_examples:,} examples{pool}"),
        *shared_rows(plan),
        (
            "step",
            f"{plan.expected_count:,} {unit} expected, with probability "
            f"{at_least(plan.sampling.prob, '.3g')}",
        ),
        ("group size", f"{plan.group_size:,} of a user's examples {share} at most{chosen}"),
        ("adjacency", plan.compared),
        ("clipping", f"{plan.clipping}, C = {plan.clip_norm:g}{moves}"),
        ("epsilon", epsilon),
        ("noise multiplier", at_most(plan.noise_multiplier, ".4f")),
        ("noise", f"{noise}{on_sums}{rows}"),
        *evaluation_rows(plan),
        ("compute", f"{compute}, {plan.num_parameters:,} parameters"),
        ("workers", f"{workers.num_workers} x {workers.describe()}; {workers.num_lanes} lanes"),
    ]


def evaluation_rows(plan: Plan) -> list[tuple[str, str]]:
    """The row on evaluations with noise: cost for held-out users and noise; empty without them."""
    if (how := plan.evaluations) is None:
        return []
    cost = f"epsilon {how.epsilon:g} at delta {at_most(how.delta, '.2e')} of held-out users"
    noise = f"noise of {at_most(how.stddev, '.2g')} nats/token on the loss of {how.num_users:,}"
    return [("evaluation", f"{how.count:,} times, {cost}; {noise}")]


def shared_rows(plan: Plan) -> list[tuple[str, str]]:
    """The row on texts with several owners; empty without such texts."""
    if (shared := plan.shared) is None:
        return []
    several = f"{shared.with_several_owners:,} with several owners"
    groups = ""
    if plan.algorithm == Algorithm.ULS:
        groups = f"; a user in {shared.max_changed:,} groups of others at most"
    return [("texts", f"{several}; {shared.left_out:,} left out{groups}")]


COLUMNS = ("run", "algorithm", "data", "epsilon", "steps", "loss", "status")


def runs_in(place: Path) -> list[dict[str, Any]]:
    """Rows for the runs in a directory and below, by path.

    Returns:
      A dict for each run, of `COLUMNS`, `num_steps` and `guarantee`. epsilon is what the run may
      claim: that of its plan, once a step was released. loss is the last one on held-out users.
      status is finished, running, stopped (--resume continues it) or damaged.
    """
    configs = sorted(place.rglob(directory.CONFIG))
    return [row for row in (_row(path.parent, place) for path in configs) if row is not None]


def _row(run_dir: Path, place: Path) -> dict[str, Any] | None:
    """The row of a run; None if its config.json is of something else, such as a model."""
    name = str(run_dir.relative_to(place))
    try:
        if "identity" not in read_json(run_dir / directory.CONFIG):
            return None
        stored = directory.load(run_dir)
        return {"run": name, **_facts(run_dir, stored)}
    except (FedsimError, OSError, KeyError, TypeError, ValueError):
        return {**dict.fromkeys(COLUMNS), "run": name, "status": "damaged"}


def _facts(run_dir: Path, stored: StoredRun) -> dict[str, Any]:
    summary = directory.summary_of(run_dir)
    epsilon, steps, loss = math.inf, 0, math.nan
    if summary is not None:
        epsilon, steps = spent(summary), int(summary["steps_done"])
        loss = float(summary["final_eval_loss"] or math.nan)
    else:
        lines = ledger.read(run_dir)[1:]
        logged = metrics.read(run_dir)
        losses = [float(line["eval/loss"]) for line in logged if "eval/loss" in line]
        steps = len(lines) or max((line["step"] for line in logged), default=0)
        if stored.private:
            plan = stored.plan if lines else None
            epsilon = plan.target_epsilon + plan.slack.epsilon if plan else math.nan
        loss = losses[-1] if losses else math.nan
    plan, num_steps = stored.plan, stored.settings.num_steps
    return {
        "algorithm": stored.identity.algorithm,
        "data": Path(str(settings_of(stored.run)["data"])).name,
        "epsilon": epsilon,
        "steps": steps,
        "num_steps": num_steps,
        "loss": loss,
        "status": _status(run_dir, steps >= num_steps),
        "guarantee": plan is not None and plan.guarantee,
    }


def _status(run_dir: Path, ended: bool) -> str:
    try:
        with directory.lock(run_dir, to_read=True):
            return "finished" if ended else "stopped"
    except Busy:
        return "running"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a text table of the rows; a star marks an epsilon that is no guarantee."""
    return aligned([COLUMNS, *map(_cells, rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] == "damaged":
        return [row["run"], *["-"] * (len(COLUMNS) - 2), "damaged"]
    epsilon = "-" if math.isnan(row["epsilon"]) else "inf"
    if math.isfinite(row["epsilon"]):
        epsilon = at_most(row["epsilon"], ".4f") + ("" if row["guarantee"] else "*")
    loss = "-" if math.isnan(row["loss"]) else f"{row['loss']:.4g}"
    steps = f"{row['steps']}/{row['num_steps']}"
    first = [str(row[name]) for name in ("run", "algorithm", "data")]
    return [*first, epsilon, steps, loss, row["status"]]
