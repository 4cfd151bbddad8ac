"""`fedsim recommend`: which algorithm to use, and how to set it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.arguments import set_threads
from fedsim.config import PrivacyConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class AdvisedRun(RunConfig):
    """The flags of train that the commands which are printed take over."""

    run_dir: Path = Path("runs")
    """Where the commands that are printed put their runs."""


@dataclasses.dataclass(frozen=True)
class Recommend:
    """Which of ELS and ULS to use on some data, and how to set it, for a privacy and a compute
    budget. Looks at the data without protection, and says at what.

    Takes the flags of train, too; the commands that it prints have them.
    """

    epsilon: float
    """Target user-level epsilon. > 0 and finite."""

    num_steps: int
    """T: number of steps. >= 1."""

    run: tyro.conf.OmitArgPrefixes[AdvisedRun]

    budget: int = 128
    """Expected gradients per step, for either algorithm. >= 1."""

    delta: float | None = None
    """In (0, 1). Default: n^-1.1 for n training examples."""

    clipping: Literal["normalised", "plain"] = "normalised"
    """As for train."""

    sampling: Literal["poisson", "shuffle"] = "poisson"
    """As for train."""

    users: int = 128
    """How many users' gradients are looked at. >= 1."""

    plot: Path | None = None
    """A PNG to draw: noise per step against group size, for both."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        names = ("epsilon", "num_steps", "budget", "delta", "clipping", "sampling")
        privacy = PrivacyConfig(**{name: getattr(self, name) for name in names})
        set_threads(self.run)
        from fedsim.advice import report
        from fedsim.console import Console
        from fedsim.recommend import recommend

        result = recommend(privacy, self.run, Console(), num_users=self.users, plot=self.plot)
        if not self.json:
            print(report(result))
        return result
