"""`fedsim pretrain`, `personalize`, `generate`, `export`: models before and after training."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsModel, ReadsRun, ReadsSources
from fedsim.config import (
    Algorithm,
    Personalization,
    PretrainConfig,
    PrivacyConfig,
    RunConfig,
    changed_run,
)
from fedsim.errors import expect, printable


@dataclasses.dataclass(frozen=True)
class Train(ReadsSources):
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
        from fedsim.engine import keep_memory, set_threads

        run = self.run
        if self.dry_run:  # in this process alone, on what there is here
            device = run.engine.accelerator if run.engine.kind == "local" else "auto"
            run = changed_run(run, engine="local", accelerator=device)
        set_threads(run.engine)  # of the process that computes, in a dry run this one
        keep_memory()
        from fedsim.run import Console

        console = Console(log_every=run.log_every)
        args = (Algorithm(self.algorithm), self.privacy, run, console)
        if self.dry_run:
            from fedsim.training import dry_run

            return dry_run(*args, self.run.engine)
        from fedsim.training import train

        summary = train(*args)
        console.summary(summary, self.run.run_dir)
        return summary


@dataclasses.dataclass(frozen=True)
class Evaluate(ReadsRun):
    """Loss of a run's last checkpoint on all held-out examples; with --epsilon, with noise.

    Without --epsilon it is computed from texts of held-out users, and of training users, as they
    are: not to be published. With it, the mean of users' losses on one split is released privately
    and counted in the ledger of the data; each time it is typed is another release.
    """

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    epsilon: float | None = None
    """Private: what the evaluation costs every user of the split. > 0."""

    delta: float | None = None
    """Private: in (0, 1). Default: N^-1.1 for the split's N users."""

    split: Literal["eval_users", "eval_examples", "test"] = "eval_users"
    """Private: users held out of training, held-back examples of those trained on, or later
    examples."""

    loss_bound: float | None = None
    """Private: a user's loss above counts as it, in nats per token; the noise is proportional to
    it. Do not choose it by looking at the split. > 0. Default: that of guessing uniformly."""

    limit_epsilon: float | None = None
    """Private: refuse the evaluation if all releases from these users' texts, this one included,
    could cost one of them more. > 0. Default: the limits in the ledger of the data."""

    budget_ledger: Path | None = None
    """Private: directory of the ledger of the data. Default: that of the run."""

    engine: Literal["ray", "local"] = "local"
    """Where to compute; see train. With --epsilon: in this process."""

    num_workers: int | None = None
    """Worker processes of engine ray; see train."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.run import directory

        self._expect_epsilon()
        stored = directory.load(self.run_dir)
        run = changed_run(
            stored.run,
            engine=self.engine,
            num_workers=self.num_workers,
            limit_epsilon=self.limit_epsilon,
            budget_ledger=self.budget_ledger or stored.run.budget_ledger,
        )
        set_threads(run.engine)
        from fedsim.run import Console

        if self.epsilon is None:
            from fedsim.evaluate import evaluate_run

            result = evaluate_run(stored, run, Console())
        else:
            from fedsim.training import PrivateEvaluation, evaluate_privately

            how = PrivateEvaluation(self.epsilon, self.delta, self.split, self.loss_bound)
            result = evaluate_privately(stored, run, how, Console())
        if not self.json:
            print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
        return result

    def _expect_epsilon(self) -> None:
        """Raises ConfigError: something is said of a private evaluation, and it is none."""
        if self.epsilon is None:
            for name in ("delta", "loss_bound", "limit_epsilon", "budget_ledger"):
                value = getattr(self, name)
                expect(name, value, value is None, "--epsilon beside it")
            expect("split", self.split, self.split == "eval_users", "--epsilon beside it")
        else:
            expect("engine", self.engine, self.engine == "local", "local, with --epsilon")


@dataclasses.dataclass(frozen=True)
class Pretrain(ReadsSources):
    """Train on public text WITHOUT privacy, to have a model for `train --model`.

    Whose text it is plays no part. The learning rate rises to --learning-rate, then falls to zero
    like a cosine.
    """

    pretrain: Flat[PretrainConfig]
    run: Flat[RunConfig]

    config: Path | None = None
    """A TOML file with defaults for any of these flags (num_steps = 200); flags override it."""

    json: bool = False
    """Print summary.json's object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.training import pretrain

        return pretrain(self.pretrain, self.run, Console(log_every=self.run.log_every))


@dataclasses.dataclass(frozen=True)
class Personalize(ReadsRun):
    """Loss of a run's last checkpoint on held-out users with and without personalization: SGD on
    half of each user's examples, evaluated on the other half."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    how: Flat[Personalization]

    split: Literal["eval_users", "test"] = "eval_users"
    """Whose text: users held out of training, or the later examples."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.run import directory

        stored = directory.load(self.run_dir)
        run = changed_run(stored.run, engine="local")
        set_threads(run.engine)
        from fedsim.run import Console
        from fedsim.training import personalize_run

        result = personalize_run(stored, run, Console(), split=self.split, settings=self.how)
        del result["per_user"]  # of single persons
        if not self.json:
            shown = ("num_users", "learning_rate", "loss", "personalized_loss", "gain_error")
            print(*(f"{name} {result[name]}" for name in shown), sep="\n")
        return result


@dataclasses.dataclass(frozen=True)
class Generate(ReadsModel):
    """Write text with a run's last checkpoint, or with a pretrained model."""

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, hf:NAME, or a GGUF file."""

    prompt: str = ""
    """What the text begins with."""

    num_tokens: int = 64
    """Most tokens to write. >= 1."""

    temperature: float = 1.0
    """Logits are divided by it. >= 0; 0 always takes the likeliest token."""

    top_k: int = 0
    """Draw only from so many likeliest tokens. >= 0; 0: from all."""

    seed: int = 0
    """Another one gives another text."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.generate import generate_text

        result = generate_text(
            self.model,
            self.prompt,
            num_tokens=self.num_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
        )
        if not self.json:
            text = result["prompt"] + result["text"]
            print(printable(text, "\n\t") if sys.stdout.isatty() else text)
            if result["stopped"] == "length":
                print(f"(the model's length is {result['max_length']} tokens)", file=sys.stderr)
        return result


@dataclasses.dataclass(frozen=True)
class Export(ReadsModel):
    """Write a model in Hugging Face's format: config.json, safetensors, tokenizer.json."""

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, hf:NAME, or a GGUF file."""

    out: Path
    """Directory to make."""

    adapter: bool = False
    """Write the adapters of a run with LoRA alone, in PEFT's format. Without this flag they are
    merged into their model."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.export import export

        result = export(self.model, self.out, adapter=self.adapter)
        if not self.json:
            print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
        return result
