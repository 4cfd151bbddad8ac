"""What the guarantee of a run does not cover, as values: the words are for readers alone.

Files have the value of a `Fact`, and `--strict`, `verify`, report and card compare values. A text
may be reworded at any time; a value never changes its meaning.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self


class Option:
    """Base class of a plan's parts: how pydantic reads and describes them."""

    __pydantic_config__: ClassVar[Any] = {
        "strict": True,
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "json_schema_serialization_defaults_required": True,
    }


ALL_COVERED = "nothing outside the guarantee"
NO_GUARANTEE = "no guarantee: "


class Fact(StrEnum):
    """A kind of fact: its value in files, its text, and the setting that causes it. {} in the text
    is the parameter."""

    text: str
    setting: str

    NO_NOISE = "no-noise", "no noise", "epsilon"
    TRIAL = "trial", "a trial of a private selection, which costs more"
    KNOWN_SEED = "known-seed", "a known seed, with which anyone can remove the noise", "seed"
    COUNTS = "counts", "how many users and examples there are, and the size of a pool", "adjacency"
    OWNERS = "owners", "how many users and texts there are, and who owns which of them", "data"
    MIN_EXAMPLES = "min-examples", "who has at least {} texts (min_examples)", "data"
    SKIP_UNKNOWN = "skip-unknown", "who has a row that was not left out (skip_unknown)", "data"
    DELTA = "delta", "delta (N^-1.1 for the N users)", "delta"
    GROUP_SIZE = "group-size", "group_size (the median user's number of examples)", "group_size"
    SAMPLED_NORMS = "sampled-norms", "{} (gradient norms of a sample of users)"
    TOKENIZER = "tokenizer", "the tokenizer (not said to be public)", "tokenizer"
    TUNED_ON_DATA = "chosen-on-data", "{} (chosen by looking at this data)", "tuned_on_data"
    CALLBACK = "callback", "metrics without noise, by which {} can stop the run", "callbacks"
    OWN_TASK = "own-task", "the task's own code, which makes parameters and rows of texts", "task"
    OWN_ALGORITHM = "own-algorithm", "the event of {}, which its author has to prove", "algorithm"
    MODEL = "model", "model={}, with all texts that it was trained on before"

    def __new__(cls, value: str, text: str, setting: str = "") -> Self:
        """A member, which equals its value."""
        fact = str.__new__(cls, value)
        fact._value_, fact.text, fact.setting = value, text, setting
        return fact


PUBLIC = frozenset({Fact.COUNTS, Fact.OWNERS, Fact.MIN_EXAMPLES, Fact.SKIP_UNKNOWN})
"""What the guarantee takes as known to everyone."""
ASSUMPTIONS = frozenset({Fact.MODEL})
"""What the training starts from: no caveats, since the guarantee is about the data alone."""
GIVEN = ASSUMPTIONS | {Fact.OWN_ALGORITHM}
"""What the guarantee rests on."""


@dataclass(frozen=True)
class Caveat(Option):
    """A fact about one run that its guarantee does not cover, or assumes."""

    fact: Fact
    of: str = ""
    """Parameter: the setting, file or package that the fact is about."""

    def __str__(self) -> str:
        """The fact in words."""
        start = "public by assumption: " if self.fact in PUBLIC else ""
        start = "taken as given: " if self.fact in GIVEN else start
        return start + self.fact.text.format(self.of)

    @property
    def line(self) -> str:
        """The fact as a line of its own."""
        return str(self) if self.fact in PUBLIC | GIVEN else f"not private: {self}"

    def as_dict(self) -> dict[str, str]:
        """The fact in JSON, with its words beside it."""
        return {"fact": self.fact.value, "of": self.of, "text": str(self)}


def voiding(epsilon: float, *, seeded: bool, trial: bool = False) -> list[Caveat]:
    """The facts with which an epsilon is no guarantee. Args: seeded: the key is of a seed."""
    caused = {Fact.NO_NOISE: math.isinf(epsilon), Fact.TRIAL: trial, Fact.KNOWN_SEED: seeded}
    return [Caveat(fact) for fact, holds in caused.items() if holds]


def in_words(reasons: str) -> str:
    """Reasons why epsilon is no guarantee, in words; "no noise" if there are none.

    Args: reasons: values of facts, or words, which ledgers of earlier versions have.
    """
    parts = (reasons or Fact.NO_NOISE).split("; ")
    values = {fact.value: fact.text for fact in Fact}
    return "; ".join(values.get(part, part) for part in parts)
