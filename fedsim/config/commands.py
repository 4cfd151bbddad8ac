"""The settings of audits, of pre-training and of personalization."""

import dataclasses

from fedsim.errors import expect


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """What is planted in a training that is audited, and how sure its bound is to be."""

    gradient_canaries: int = 400
    """Made-up users whose gradient always points their own way. >= 0; each is included with
    probability 1/2. At delta 1e-6, 400 can refute epsilons below 4.38, and 17,000 below 8; held
    against the whole curve of a training that is nearly Gaussian, 250 can refute 8, fewer if they
    are taken to be independent."""

    text_canaries: int = 100
    """Made-up users who wrote a line of made-up words. >= 0; each is included with probability
    1/2."""

    confidence: float = 0.95
    """How sure each lower bound is. In [0.5, 1)."""

    attacked_users: int = 200
    """How many real users, in training and held out, are told apart by their loss. >= 0."""

    def __post_init__(self):
        for name in ("gradient_canaries", "text_canaries", "attacked_users"):
            expect(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        total = self.gradient_canaries + self.text_canaries
        expect("gradient_canaries", self.gradient_canaries, total > 0, "a canary of either kind")
        expect("confidence", self.confidence, 0.5 <= self.confidence < 1, "in [0.5, 1)")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """How a pre-training is done, beside its `RunConfig`. It has no privacy, hence none of its
    constants."""

    num_steps: int
    """Number of steps. >= 1. The paper's: 400,000."""

    batch_size: int = 512
    """Examples of a step; each is seen once in every pass over the data. >= 1."""

    rows_per_pass: int = 16
    """Examples of one forward and backward pass. >= 1; divides the batch size."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises. In [0, num_steps)."""

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "rows_per_pass"):
            expect(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        rows = self.rows_per_pass
        whole = self.batch_size % rows == 0
        expect("batch_size", self.batch_size, whole, f"a multiple of rows_per_pass={rows}")
        warmup = self.warmup_steps
        expect("warmup_steps", warmup, 0 <= warmup < self.num_steps, f"in [0, {self.num_steps})")


@dataclasses.dataclass(frozen=True)
class Personalization:
    """How models are personalized. The defaults are the paper's, where it says."""

    num_epochs: int = 4
    """How often SGD goes over a user's first half. >= 1."""

    batch_size: int = 8
    """Examples of a step of SGD. >= 1."""

    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Learning rates of SGD that are tried; the best one counts. > 0."""

    users: int = 256
    """How many users are looked at, drawn at random. >= 1."""

    max_examples: int = 64
    """Most examples of a user's half. >= 1."""

    seed: int = 0
    """Seed of the draw of users, of halves and of the order of examples: the same for every
    model."""

    def __post_init__(self):
        for name in ("num_epochs", "batch_size", "users", "max_examples"):
            expect(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        rates = self.learning_rates
        expect("learning_rates", rates, bool(rates) and min(rates) > 0, "numbers > 0")
