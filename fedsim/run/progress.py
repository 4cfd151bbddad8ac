"""How far the steps of a run have come.

On a terminal and in a notebook a line that is written over, in job logs one plain line for each
reporting interval. Where a line is narrow, epsilon stays, and what follows it goes.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console as RichConsole
from rich.text import Text

from fedsim.accounting.rounding import at_most

SHOWN = {
    "privacy/epsilon": "epsilon",
    "comparison_only/epsilon_as_if_poisson": "epsilon as if Poisson sampled",
    "comparison_only/epsilon_of_assumed_population": "epsilon of an assumed population",
    "eval/loss": "eval loss",
    "non_private/loss": "loss (non-private)",
    "non_private/gradients_per_second": "gradients/s",
    "performance/tokens_per_second": "tokens/s",
}
"""Metrics of a step by what a person reads, in the order of their worth."""
BAR, WITH_BAR = 10, 80  # columns: of a bar, and of a terminal that has one
EVALUATED = "eval/step"
"""After which step the held-out loss that is shown was computed: a step may end before that."""
QUIET_S = 10.0  # for so long a log may say nothing of steps

Show = Callable[[int, dict[str, float]], None]


def items(values: dict[str, float]) -> list[str]:
    """The metrics of a step that have a value, in words."""
    known = {name: values.get(metric) for metric, name in SHOWN.items()}
    there = {n: v for n, v in known.items() if v is not None and not math.isnan(v)}
    of_step = f" after step {values[EVALUATED]:g}" if EVALUATED in values else ""
    of = {SHOWN["eval/loss"]: of_step}
    return [f"{name} {_shown(name, value)}{of.get(name, '')}" for name, value in there.items()]


def _shown(name: str, value: float) -> str:
    """Four digits; an epsilon is rounded up."""
    return at_most(value, ".4g") if "epsilon" in name else f"{value:.4g}"


def line(values: dict[str, float]) -> str:
    """Metrics of a step in one line."""
    return "  ".join(items(values))


def fitted(parts: list[str], width: int) -> str:
    """The first part, and as many of those after it as there is room for."""
    longer = list(itertools.accumulate(parts, "{}  {}".format))
    return next((text for text in reversed(longer) if len(text) <= width), "".join(parts[:1]))


@contextmanager
def on_terminal(
    out: RichConsole, first: int, last: int
) -> Iterator[tuple[Show, Callable[[str], None]]]:
    """A line that is written over: what shows a step, and what shows a text in its place."""
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
    """One line after every so many steps, and after each that ends long after the last line."""
    started = shown = time.monotonic()

    def show(step: int, values: dict[str, float]) -> None:
        nonlocal shown
        now = time.monotonic()
        if step == first + 1:  # it compiled, and said so
            shown = now
        if step % every == 0 or step in (first + 3, last) or now - shown >= QUIET_S:
            left = (now - started) / (step - first) * (last - step)
            note(f"step {step}/{last}  {line(values)}  left {left:.0f} s")
            shown = now

    return show


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and hasattr(sys.stderr, "pub_thread")


def notebook_bar(first: int, last: int) -> Show:
    """One line of the cell's output that is written over after every step."""
    started = time.monotonic()

    def show(step: int, values: dict[str, float]) -> None:
        done = round(20 * step / last)
        left = (time.monotonic() - started) / (step - first) * (last - step)
        bar = f"{'█' * done}{'░' * (20 - done)} {step}/{last}  {line(values)}  left {left:.0f} s"
        end = "\n" if step == last else ""
        print(f"\r{bar:120}", end=end, file=sys.stderr, flush=True)

    return show
