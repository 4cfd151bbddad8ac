"""A run as an object: what came out of it, and what can be done with it."""

import functools
import math
from pathlib import Path
from typing import Any

from fedsim.config import changed_run
from fedsim.engine import set_threads
from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home
from fedsim.run import Console, StoredRun, checkpoint, directory, guarantee_line, spent
from fedsim.trust import Check


def load(run_dir: str | Path) -> "Run":
    """The run that a directory holds. Raises: ConfigError: there is none."""
    return Run(run_dir)


class Run:
    """What a training left in its directory. Everything is read from there when it is asked for."""

    def __init__(self, run_dir: str | Path):
        """Raises: ConfigError: `run_dir` holds no run. FileDamaged: its settings were changed."""
        self.run_dir = Path(expand_home("run_dir", run_dir))
        self.stored: StoredRun = directory.load(self.run_dir)

    def __repr__(self) -> str:
        if not (self.run_dir / directory.SUMMARY).exists():
            return f"Run({str(self.run_dir)!r}: not ended)"
        steps = f"{self.summary['steps_done']} of {self.summary['num_steps']} steps"
        about = f"{self.stored.identity.algorithm}, {steps}, eval loss {self.eval_loss:.4g}"
        return f"Run({str(self.run_dir)!r}: {about}; {guarantee_line(self.summary)})"

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds. Raises: ConfigError: the run has not ended."""
        if (found := directory.summary_of(self.run_dir)) is None:
            raise ConfigError.of("run", self.run_dir, "a run that has ended")
        return found

    @property
    def epsilon(self) -> float:
        """The user-level epsilon that is claimed, at `delta`, with the slack of noise that is not
        ideal; inf without noise. Of a run that ended before its last step, that of all steps that
        it planned: it may have been stopped by looking at what it had released."""
        return spent(self.summary)

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return float(self.summary["delta"])

    @property
    def eval_loss(self) -> float:
        """The last loss on users who were not trained on, in nats per token; nan if there are
        none."""
        loss = self.summary["final_eval_loss"]
        return math.nan if loss is None else float(loss)

    @property
    def finished(self) -> bool:
        """Whether all steps have been trained."""
        return self.summary["steps_done"] == self.summary["num_steps"]

    @functools.cached_property
    def params(self) -> Any:
        """The parameters of the last checkpoint, a tree of NumPy arrays: of the whole model, or of
        its adapters. Raises: ConfigError: there is no checkpoint."""
        newest = checkpoint.latest(self.run_dir)
        if newest is None:
            raise ConfigError.of("run", self.run_dir, "a run with a checkpoint")
        return checkpoint.load_params(newest)

    def evaluate(self, *, epsilon: float | None = None, **how: Any) -> dict[str, Any]:
        """Losses on all examples of all splits that were not trained on, by metric name.

        Args:
          epsilon: release the mean loss of one split's users with noise instead, for this epsilon
            of theirs, which the ledger of the data counts.
          how: delta, split and loss_bound; see `PrivateEvaluation`.
        """
        run = changed_run(self.stored.run, engine="local")
        set_threads(run.engine)
        if epsilon is None:
            expect("epsilon", epsilon, not how, f"a value, beside {', '.join(how)}")
            from fedsim.evaluate import evaluate_run

            return evaluate_run(self.stored, run, Console())
        from fedsim.training import PrivateEvaluation, evaluate_privately

        return evaluate_privately(self.stored, run, PrivateEvaluation(epsilon, **how), Console())

    def verify(
        self, *, replay: bool = False, whole: bool = False, data: str | Path | None = None
    ) -> list[Check]:
        """What `fedsim verify` finds: a `Check` for each promise, in order.

        Args:
          replay: compute the last steps again, and compare every bit.
          whole: compute all steps again.
          data: where the data are now. Default: where they were when the run was started.
        """
        set_threads(self.stored.run.engine)
        from fedsim.trust import verify

        again = "whole" if whole else "last" if replay else ""
        place = None if data is None else expand_home("data", data)
        return verify(self.run_dir, data=place, again=again, console=Console())

    def report(self, out: str | Path | None = None) -> dict[str, Any]:
        """Write the privacy report; returns its claim and where it was written.

        Args: out: the directory for report.html and report.md. Default: the run's.
        Raises: ReportError: a promise is violated, or there is no model to report of.
        """
        from fedsim.trust import report

        return report(self.run_dir, Path(expand_home("out", out or self.run_dir)), Console())

    def generate(
        self,
        prompt: str = "",
        *,
        num_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> str:
        """What the model writes after a prompt.

        Args:
          temperature: logits are divided by it; 0 takes the likeliest token.
          top_k: only so many likeliest tokens are drawn from; 0: all.
        """
        from fedsim.generate import generate_text

        return generate_text(
            str(self.run_dir),
            prompt,
            num_tokens=num_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )["text"]

    def to_hf(self, out: str | Path) -> Path:
        """Write the model as a Hugging Face directory, adapters merged; returns the directory."""
        from fedsim.export import export

        return Path(export(str(self.run_dir), out)["out"])

    def to_peft(self, out: str | Path) -> Path:
        """Write the adapters of a run with LoRA in PEFT's format; returns the directory."""
        from fedsim.export import export

        return Path(export(str(self.run_dir), out, adapter=True)["out"])
