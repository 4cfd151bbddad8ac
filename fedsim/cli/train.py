"""`fedsim train`, `fedsim evaluate`: the training, and the loss of what came out."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.config import Algorithm, PrivacyConfig, RunConfig, changed_run

Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Train:
    """Fine-tune a model with user-level differential privacy.

    els samples and clips examples (DP-SGD-ELS), uls samples and clips users (DP-SGD-ULS).
    """

    algorithm: tyro.conf.Positional[Literal["els", "uls"]]
    """els or uls."""

    privacy: Flat[PrivacyConfig]
    run: Flat[RunConfig]

    config: Path | None = None
    """A TOML file with defaults for any of these flags (num_steps = 200); flags override it."""

    dry_run: bool = False
    """Show the plan, its noise, and about what it takes of time and memory, and train nothing."""

    json: bool = False
    """Print summary.json's object on stdout; of a dry run, the plan."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.run.terminal import Terminal

        # The first line is there before what takes seconds to import.
        Terminal().note(f"reading data={self.run.data.source}, model={self.run.model.source}")
        from fedsim.engine.environment import keep_memory, set_threads

        set_threads(self.run.engine)
        keep_memory()
        from fedsim.run.console import Console

        console = Console(log_every=self.run.log_every)
        from fedsim.training import train

        if self.dry_run:
            from fedsim.run.cost import here

            args = (Algorithm(self.algorithm), self.privacy, here(self.run), console)
            return train(*args, rehearsed=self.run.engine)
        summary = train(Algorithm(self.algorithm), self.privacy, self.run, console)
        console.summary(summary, self.run.run_dir)
        return summary


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Loss of a run's last checkpoint on all held-out examples."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    engine: Literal["ray", "local", "spmd"] = "local"
    """Where to compute; see train."""

    num_workers: int | None = None
    """Worker processes of engine ray; see train."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine.environment import set_threads
        from fedsim.run import directory

        stored = directory.load(self.run_dir)
        run = changed_run(stored.run, engine=self.engine, num_workers=self.num_workers)
        set_threads(run.engine)
        from fedsim.evaluate import evaluate_run
        from fedsim.run.console import Console

        result = evaluate_run(stored, run, Console())
        if not self.json:
            print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
        return result
