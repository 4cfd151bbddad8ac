"""`fedsim pretrain`, `personalize`, `generate`, `export`: models before and after training."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.screen import ReadsSources
from fedsim.config import Personalization, PretrainConfig, RunConfig, changed_run
from fedsim.errors import printable

Flat = tyro.conf.OmitArgPrefixes


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
class Personalize:
    """Loss of a run's last checkpoint on held-out users with and without personalization: SGD on
    half of each user's examples, evaluated on the other half."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    how: Flat[Personalization]

    split: Literal["eval_users", "test"] = "eval_users"
    """Whose text: users held out of training, or the later examples."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading run={self.run_dir}"

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
class Generate:
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

    @property
    def doing(self) -> str:
        return f"reading model={self.model}"

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
class Export:
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

    @property
    def doing(self) -> str:
        return f"reading model={self.model}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.export import export

        result = export(self.model, self.out, adapter=self.adapter)
        if not self.json:
            print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
        return result
