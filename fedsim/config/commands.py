"""Settings of audits and generation."""

import dataclasses
import math

from fedsim.errors import expect, expect_least


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """Canaries that an audit plants, and the confidence of its tests."""

    gradient_canaries: int = 400
    """Number of made-up users whose gradient always points in a direction of their own; each is
    included with probability 1/2. >= 0. More canaries can refute larger epsilons: 250 can refute 8
    at delta 1e-6, of a nearly Gaussian training."""

    text_canaries: int = 100
    """Number of made-up users who wrote a line of made-up words; each is included with probability
    1/2. >= 0."""

    confidence: float = 0.95
    """Confidence of a refutation by guesses. In [0.5, 1)."""

    def __post_init__(self):
        expect_least(self, gradient_canaries=0, text_canaries=0)
        total = self.gradient_canaries + self.text_canaries
        expect("gradient_canaries", self.gradient_canaries, total > 0, "a canary of either kind")
        expect("confidence", self.confidence, 0.5 <= self.confidence < 1, "in [0.5, 1)")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the model.

    The fields apply in their order."""

    temperature: float = 1.0
    """Divides the logits. 0, which always takes the likeliest token, or >= 0.001."""

    top_k: int = 0
    """Number of likeliest tokens to draw from. >= 0; 0: all."""

    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together. In (0, 1]."""

    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest. In [0, 1]."""

    def __post_init__(self):
        heat = self.temperature
        expect("temperature", heat, heat == 0 or 1e-3 <= heat < math.inf, "0, or >= 0.001")
        expect("top_k", self.top_k, self.top_k >= 0, ">= 0")
        expect("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        expect("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
