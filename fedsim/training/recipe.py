"""The update of a run where its user leaves it open: by a rule in what is public.

The rule comes from public text (`experiments/optimizers.py`). No text that is to be protected plays
a part in it, so it costs no privacy.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from fedsim.config import UPDATE, RunConfig
from fedsim.errors import ConfigError
from fedsim.training import optimizers

PAPER: dict[str, Any] = {
    **{"optimizer": "adafactor", "learning_rate": 0.1, "schedule": "constant", "ema": 0.0}
}
"""Charles et al. 2024 (Section 5), who tune the rate on a grid."""
RATES = {"adafactor": 0.1, "adam": 0.01, "adamw": 0.01}
"""Of optimizers that divide by the size of what they see: it does not depend on the noise."""
MOMENTUM_RATES = {  # what is trained: (rate where bound / stddev is 100, exponent of it, the most)
    "fresh": (0.15, 1.2, 0.3),
    "pretrained": (6.4e-3, 1.0, 0.03),
    "adapters": (4.7e-2, 1.0, 0.1),
}
STEPS = 100
AVERAGED = 10  # steps that the average looks back, about: a tenth of a run of STEPS


class Noise(NamedTuple):
    """What the rule asks of a run. All of it is public."""

    stddev: float
    """Of the noise on a coordinate of a step's mean gradient: C sigma / M, or C sigma / B. Where
    noise is correlated, of the independent noise that adds as much to sums of steps."""
    bound: float
    """On that gradient's norm: C, or 1 with normalised clipping."""
    num_steps: int


def settled(run: RunConfig, noise: Noise | None, *, fresh: bool = True) -> RunConfig:
    """The run with nothing of its update left open.

    Args:
      noise: None: of pre-training, which has none and is set as in the paper.
      fresh: whether the model that is trained is not a pretrained one.
    Raises: ConfigError: there is no rule for the rate of its optimizer.
    """
    usual = PAPER
    if noise is not None and run.recipe != "paper":
        kind = run.optimizer or "momentum"
        trained = "adapters" if run.model.lora_rank else "fresh" if fresh else "pretrained"
        ema = max(0.0, 1 - AVERAGED / noise.num_steps)
        rate = run.learning_rate or _rate(kind, noise, *MOMENTUM_RATES[trained])
        usual = {"optimizer": kind, "learning_rate": rate, "schedule": "constant", "ema": ema}
    own = {name: getattr(run, name) for name in UPDATE}
    return dataclasses.replace(run, **{n: usual[n] if v is None else v for n, v in own.items()})


def _rate(optimizer: str, noise: Noise, usual: float, exponent: float, most: float) -> float:
    kind = optimizer.partition(":")[0]
    if kind in RATES:
        return RATES[kind]
    if kind not in ("momentum", "sgd"):
        optimizers.optimizer(optimizer, 1.0)  # the first mistake: there is none of that name
        expected = f"a value: there is a rule for momentum, sgd, {', '.join(RATES)} alone"
        raise ConfigError.of("learning_rate", None, f"{expected}, not for {kind}")
    # Noise moves each parameter by rate times stddev times the root of the number of steps.
    share = noise.bound / max(noise.stddev, 1e-12) * math.sqrt(STEPS / max(STEPS, noise.num_steps))
    rate = min(most, usual * (share / 100) ** exponent) / noise.bound
    # A gradient moves the parameters by 1 / (1 - momentum) times the rate, in all.
    faded = (1 - optimizers.momentum_of(optimizer)) / (1 - optimizers.MOMENTUM)
    return float(f"{rate * faded:.3g}")
