"""`fedsim pretrain`, `generate`, `export`: models before and after training on users' text."""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from fedsim.arguments import set_threads
from fedsim.config import PretrainConfig, RunConfig, expect

Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Pretrain:
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
        set_threads(self.run)
        from fedsim.console import Console
        from fedsim.pretrain import pretrain

        return pretrain(self.pretrain, self.run, Console(log_every=self.run.log_every))


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

    def __call__(self) -> dict[str, Any]:
        expect("num_tokens", self.num_tokens, self.num_tokens >= 1, ">= 1")
        expect("temperature", self.temperature, self.temperature >= 0, ">= 0")
        expect("top_k", self.top_k, self.top_k >= 0, ">= 0")
        from fedsim.generate import generate_text

        names = ("num_tokens", "temperature", "top_k", "seed")
        options = {name: getattr(self, name) for name in names}
        found = generate_text(self.model, self.prompt, **options)
        if not self.json:
            print(found["prompt"] + found["text"])
        return found


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a model in Hugging Face's format: config.json, safetensors, tokenizer.json."""

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, hf:NAME, or a GGUF file."""

    out: Path
    """Directory to make."""

    adapter: bool = False
    """Of a run with LoRA: the adapters alone, in PEFT's format. Else they are merged."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.export import export

        found = export(self.model, self.out, adapter=self.adapter)
        if not self.json:
            print(*(f"{name} {value}" for name, value in found.items()), sep="\n")
        return found
