"""Numbers that the documents quote and that follow from computing alone, without any training.

Each row says which page quotes it and what it is of. The site takes the numbers from this table.

    python -m experiments.table_quoted --scale small      (seconds; smoke: without bands)
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from experiments.harness import experiment
from experiments.harness.rows import Row, Rows

RUN_STEPS, RUN_DELTA = 500, 1e-6
"""Of the three runs of docs/theory/budget.md, q = 0.1 and sigma = 2; trials have other steps."""
DERIVED = True
"""`status` computes its rows again."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    correlated: tuple[tuple[int, int, int], ...] = ((8_876, 100, 128), (342_477, 2_000, 1_024))
    """Users, steps, M."""
    epsilons: tuple[float, ...] = (1.0, 4.0, 8.0)
    slacks: tuple[tuple[int, int, int], ...] = (
        (124_000, 500, 8),
        (5_000_000, 2_000, 24),
        (350_000_000, 2_000, 8),
    )
    """Parameters, steps, bands; at epsilon 4, delta 1e-6, sigma 1.3."""


SETTINGS = {
    "smoke": Settings(correlated=(), slacks=((124_000, 500, 8),)),
    "small": Settings(),
    "paper": Settings(),
}


def run(settings: Settings) -> Rows:
    """All of them."""
    found = [*several_runs(), *evaluations(), *training_loss(), *selections()]
    return [*found, *correlated(settings), *slacks(settings), *papers_delta()]


def row(page: str, what: str, value: float) -> Row:
    """A number, and the page of docs/ that quotes it."""
    return {"page": page, "what": what, "value": value}


def several_runs() -> Iterator[Row]:
    """Three equal runs on the same people: added up, as a filter charges them, and composed."""
    from fedsim import accounting
    from fedsim.accounting import StepEvent
    from fedsim.budget.ledger import Entry, Released
    from fedsim.budget.spending import RunCost, total

    phases: Released = [(StepEvent(2.0, 0.1), RUN_STEPS)]
    yield row("theory/budget.md", "one run", accounting.epsilon(phases, RUN_DELTA))
    charges = []
    for number in (1, 2, 3):
        entry = Entry(number, f"run {number}", "train", "", "all", "", phases, (0.0, 0.0))
        charges.append(RunCost(entry, phases))
    found, alone = total(charges, RUN_DELTA), accounting.epsilon(phases, RUN_DELTA)
    yield row("theory/budget.md", "three runs, added up", 3 * alone)
    yield row("theory/budget.md", "three runs, chosen by looking", found.adaptive)
    yield row("theory/budget.md", "three runs, composed by losses", found.fixed)


def evaluations() -> Iterator[Row]:
    """Noise on the loss of 1,000 held-out users, of one evaluation and of each of eleven."""
    from fedsim.plan import noise_of

    for count in (1, 11):
        sigma = noise_of(1.0, 1000**-1.1, count)
        stddev = sigma * math.log(256) / 2 / 1000
        yield row("theory/budget.md", f"noise on the loss, {count} evaluations", stddev)


def training_loss() -> Iterator[Row]:
    """Noise on the mean training loss of a step."""
    from fedsim.mechanism import NoisyLoss

    released = NoisyLoss(bound=6.0, count=1000, noise_multiplier=1.0)
    stddev = released.stddev * released.bound / 2 / released.count
    yield row("theory/selection.md", "noise on the training loss", stddev)


def selections() -> Iterator[Row]:
    """One of ten settings, chosen privately, against all of them released."""
    from fedsim import accounting
    from fedsim.accounting import SelectionEvent, StepEvent

    trial = ((StepEvent(2.0, 0.1), 200),)
    yield row("theory/selection.md", "one trial", accounting.epsilon(trial, RUN_DELTA))
    for shape in (0.0, 1.0):
        event = SelectionEvent((trial,) * 10, mean=10, shape=shape)
        spent = accounting.epsilon([(event, 1)], RUN_DELTA)
        yield row("theory/selection.md", f"the best of ten expected, shape {shape:g}", spent)
    spent = accounting.epsilon(list(trial) * 10, RUN_DELTA)
    yield row("theory/selection.md", "all ten", spent)


@dataclasses.dataclass
class OneTextEach:
    """Users as samplers see them, with a text each."""

    offsets: np.ndarray
    num_users: int
    num_examples: int


def correlated(settings: Settings) -> Iterator[Row]:
    """Predicted error of the best bands, against independent noise at the same epsilon."""
    from fedsim.config import Algorithm, PrivacyConfig
    from fedsim.noise import best
    from fedsim.plan import bands_predicted

    for users, steps, cohort in settings.correlated:
        people = OneTextEach(np.arange(users + 1), users, users)
        own = {"delta": users**-1.1, "group_size": 1, "noise": "correlated"}
        for epsilon in settings.epsilons:
            privacy = PrivacyConfig(epsilon, steps, cohort, **own)
            found = bands_predicted(Algorithm.ULS, privacy, people)
            what = f"{users} users, {steps} steps, {cohort} in each, epsilon {epsilon:g}"
            yield row("theory/correlated.md", what, best(found).error / found[0].error)


def slacks(settings: Settings) -> Iterator[Row]:
    """What is added to epsilon because correlated noise is not ideal."""
    from fedsim import accounting
    from fedsim.clipping import lattice_bits
    from fedsim.noise import strategy

    for parameters, steps, bands in settings.slacks:
        stddev = 1.3 * 2.0 ** lattice_bits(parameters)
        plan = strategy(steps, bands, stddev)
        found = accounting.slack(parameters * steps, 4.0, 1e-6, plan.cell_errors)
        what = f"{parameters} parameters, {steps} steps, {bands} bands"
        yield row("theory/correlated.md", f"slack, {what}", found.epsilon)
        size = parameters * (bands - 1) * np.dtype(plan.dtype).itemsize
        yield row("theory/correlated.md", f"MB of rows of noise, {what}", size / 1e6)


def papers_delta() -> Iterator[Row]:
    """Noise of ULS or ELS with G = 1, on scotus with the paper's delta: n^-1.1, n examples. And how
    much less ULS has in the regime, where delta is N^-1.1, N users."""
    from fedsim import accounting

    page, users, examples = "lab/fig04_els_group_size.md", 7_014, 1_631_243
    found = accounting.noise_multiplier(
        epsilon=4.0, delta=examples**-1.1, num_steps=30, sampling_prob=256 / users
    )
    yield row(page, "sigma, epsilon 4, 30 steps of 256", found)
    page, steps, budget = "lab/regime.md", 300, 512
    sets = {"": (users, examples, (1, 2, 4, 16)), ", few users": (600, 158_197, (1, 4, 16))}
    for name, (users, examples, groups) in sets.items():
        for epsilon, group in itertools.product((4.0, 1.0), groups):
            own = {"epsilon": epsilon, "num_steps": steps, "sampling_prob": budget / group / users}
            papers, ours = (
                accounting.noise_multiplier(delta=delta**-1.1, **own) for delta in (examples, users)
            )
            if group == 1 and not name:
                what = f"sigma, epsilon {epsilon:g}, {steps} steps of {budget}"
                yield row(page, what, papers)
            less = f"share that sigma is less, epsilon {epsilon:g}, G = {group}{name}"
            yield row(page, less, 1 - ours / papers)


if __name__ == "__main__":
    experiment.main(globals())
