"""The command line of experiments that fine-tune: scales, data sets and starting models.

`small` and `long`, which has ten times the steps and fewer cells, start from the model that
starting_model.py makes, `paper` from a model of pretraining.py; `--model`
names another one. `--data` takes one's own data set, which `fedsim data build` built, in the place
of the experiment's: nothing is assumed of it, and the model is fresh where none is named.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import starting_model
from experiments.harness import common
from experiments.harness.records import came_from
from experiments.harness.rows import Row
from fedsim import files
from fedsim.errors import ConfigError

STACK_OVERFLOW, CC_NEWS = "Stack Overflow", "CC-News"
SMALL: dict[str, str] = dict(zip((STACK_OVERFLOW, CC_NEWS), starting_model.USERS, strict=True))
SHOWN = {
    "smoke": {STACK_OVERFLOW: "made-up text"},
    "small": {STACK_OVERFLOW: "scotus", CC_NEWS: "reddit_links"},
    "long": {STACK_OVERFLOW: "scotus", CC_NEWS: "reddit_links"},
    "paper": {},
}
"""What rows, figures and records call the data that were used, by what these stand for."""
PAPER = {STACK_OVERFLOW: "stack-overflow", CC_NEWS: "cc-news"}  # built by these recipes
PAPER_STEPS = {STACK_OVERFLOW: 10_000, CC_NEWS: 2_000}
PAPER_MODEL = "models/c4"
FRESH_MODEL = "tiny"  # for one's own data
SCALES = ("smoke", "small", "long", "paper")
OF_STAND_INS = ("small", "long")
"""Scales whose data and starting model are made on the way."""

# For estimates. Gradients of the model `tiny` with texts up to 64 tokens on one core, and what a
# run takes beside them; of the paper's model, operations of a gradient, and of an accelerator.
GRADIENTS_PER_CORE_SECOND, SECONDS_PER_RUN = 500.0, 5.0
OPERATIONS, SPEED = {"paper": 6 * 350e6 * 128}, 1e14


@dataclasses.dataclass
class Tally:
    """What an experiment has run, or would run."""

    known: dict[str, Row] = dataclasses.field(default_factory=dict)
    """What came of runs, by their names; see outcomes.py."""
    asked: set[str] = dataclasses.field(default_factory=set)
    """The names of those that results are of."""
    planned: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def run_minutes(self) -> float:
        """Of one worker, runs that were kept included."""
        return round(sum(self.known[name]["seconds"] for name in self.asked) / 60, 1)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of the command line."""

    scale: str
    out: Path
    given_model: str | None
    dry_run: bool
    data: str | None = None
    """One's own, instead of the experiment's."""
    tally: "Tally" = dataclasses.field(default_factory=lambda: Tally(), compare=False)

    @property
    def in_turn(self) -> bool:
        """True if runs have all workers of the cluster, one after another; else each is a process
        of one thread."""
        return self.scale in OPERATIONS

    @property
    def model(self) -> str:
        """What is started from; at `small` it is made if need be."""
        if self.given_model or self.data:
            return self.given_model or FRESH_MODEL
        if self.scale in OF_STAND_INS and not self.dry_run:
            return str(starting_model.model())
        made = {"smoke": FRESH_MODEL, "paper": PAPER_MODEL}
        return made.get(self.scale, "")

    def shown(self) -> Mapping[str, str]:
        """What rows, figures and records call the data, by what these stand for."""
        if not self.data:
            return SHOWN[self.scale]
        name = Path(self.data).name
        taken = {*PAPER}.union(*(own.values() for own in SHOWN.values()))
        return {STACK_OVERFLOW: f"{name} (own)" if name in taken else name}

    @property
    def runs(self) -> Path:
        """Where runs are kept: for good, but at the scale that tests use."""
        kept = files.cache_dir() / "experiments" / self.scale
        return self.out / "runs" if self.scale == "smoke" else kept


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> Arguments:
    """What all experiments have, and --model."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    common.add_arguments(parser, SCALES)
    parser.add_argument("--model", help="a size, or a model to start from")
    what = "your own data set, built by `fedsim data build`, or pydocs; results go to results/NAME"
    parser.add_argument("--data", metavar="NAME", help=what)
    given = parser.parse_args(argv)
    came_from()  # what is committed while it trains is not what trains
    if given.data and given.scale == "smoke":
        raise ConfigError.of(
            "scale", "smoke", "small or more, with --data: smoke is on made-up text"
        )
    if given.data and given.out is None:
        given.out = Path("results") / Path(given.data).name
    out = common.out_of(given)
    return Arguments(given.scale, out, given.model, given.dry_run, given.data)
