"""What texts with several owners cost in ULS: noise against how many groups of others change.

Beyond the paper; docs/theory/owners.md has the theorem. Beside the theorem's pair of distributions
stands the tempting one, of a user who adds 2 C for every group of others, which proves nothing
and takes more noise; and ELS with as many texts of a user as that. All are of epsilon 4.

    python -m experiments.table_shared_noise --scale small      (seconds)
"""

import dataclasses
import math

import numpy as np
from scipy import optimize, stats

from experiments.harness import common
from experiments.harness.rows import Rows
from fedsim import accounting
from fedsim.accounting import composition, mixture


@dataclasses.dataclass(frozen=True)
class Settings:
    """One release of T steps."""

    max_changed: tuple[int, ...] = (0, 1, 2, 5, 10)
    epsilon: float = 4.0
    delta: float = 1e-6
    num_steps: int = 1000
    sampling_prob: float = 0.01
    discretization: float = 1e-3
    """Of the tempting pair."""


SETTINGS = {
    "smoke": Settings((0, 1), num_steps=50),
    "small": Settings(),
    "paper": Settings(),
}


def run(settings: Settings) -> Rows:
    """A row for each k."""
    asked = {name: getattr(settings, name) for name in ("epsilon", "delta", "num_steps")}
    asked["sampling_prob"] = settings.sampling_prob
    return [
        {
            "max_changed": k,
            "noise_multiplier": accounting.noise_multiplier(max_changed=k, **asked),
            "of_tempting_pair": tempting(k, settings),
            "of_els": accounting.noise_multiplier(max_contributions=1 + 2 * k, **asked),
        }
        for k in settings.max_changed
    ]


def tempting(k: int, settings: Settings) -> float:
    """sigma if a user's own group counted once and k groups of others twice each."""
    draws = stats.binom.pmf(np.arange(k + 1), k, settings.sampling_prob)
    own = np.array([1 - settings.sampling_prob, settings.sampling_prob])
    counts = np.add.outer([0.0, 1.0], 2.0 * np.arange(k + 1)).ravel()
    probs = np.multiply.outer(own, draws).ravel()

    def excess(log_sigma: float) -> float:
        pair = mixture.Mixture(math.exp(log_sigma), counts, probs, 0.0)
        spent = []
        for direction in (composition.REMOVE, composition.ADD):
            step = mixture.one_step_pmf(pair, settings.discretization, direction)
            whole = composition.compose_pmfs([(step, settings.num_steps)])
            spent.append(composition.pmf_epsilon_at(whole, settings.delta))
        return max(spent) - settings.epsilon

    return math.exp(optimize.brentq(excess, math.log(0.5), math.log(20.0), xtol=1e-4))  # pyright: ignore


def check(rows: Rows) -> common.Claims:
    """The theorem's noise against the two others."""
    changed = [row for row in rows if row["max_changed"]]
    sigmas = [row["noise_multiplier"] for row in rows]
    numbers = ", ".join(f"{sigma:.3f}" for sigma in sigmas)
    claims = [("noise grows with the groups that change", sigmas == sorted(sigmas), numbers)]
    for name, what in (
        ("of_tempting_pair", "the tempting pair"),
        ("of_els", "ELS with as many texts as that pair counts"),
    ):
        others = [row[name] for row in changed]
        less = [row["noise_multiplier"] < other for row, other in zip(changed, others, strict=True)]
        shown = ", ".join(f"{sigma:.3f}" for sigma in others)
        claims.append((f"it is less than that of {what}", all(less), shown))
    return claims


if __name__ == "__main__":
    common.main(globals())
