"""Commands that make a model or use one: `fedsim train`, `evaluate`, `generate`, `export`,
`tokenizer`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsModel, ReadsRun, ReadsSources
from fedsim.config import (
    Algorithm,
    EngineConfig,
    PrivacyConfig,
    RunConfig,
    Sampling,
    changed_run,
    computed_by,
)
from fedsim.errors import expect, printable
from fedsim.run import wrapped

SPLIT_NAMES = {
    "eval_users": "held-out users",
    "eval_examples": "held-out examples of training users",
    "test": "the test split",
}


@dataclasses.dataclass(frozen=True)
class Train(ReadsSources):
    """Fine-tune a model with user-level differential privacy.

    els samples and clips examples (DP-SGD-ELS), uls samples and clips users (DP-SGD-ULS); both
    protect all texts of a user. `fedsim recommend` helps to choose. A run that was stopped or
    killed resumes with the same command and --resume.
    """

    algorithm: tyro.conf.Positional[Literal["els", "uls"]]
    """els or uls."""

    privacy: Flat[PrivacyConfig]
    run: Flat[RunConfig]

    config: Path | None = None
    """A TOML or YAML file with defaults for any of these flags (num_steps = 200; in YAML
    num_steps: 200); flags override it."""

    dry_run: bool = False
    """Show the plan, its noise, and estimates of time and memory, without training."""

    json: bool = False
    """Print the content of summary.json on stdout; with --dry-run, the plan."""

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
    """Compute the loss of a run's last checkpoint on all held-out texts, without noise.

    Do not publish it. Losses that may be published come from a training with --eval-epsilon.
    """

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    engine: Literal["ray", "local"] = "local"
    """Where to compute, as in train."""

    num_workers: int | None = None
    """Number of worker processes of --engine ray, as in train."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.run import directory

        stored = directory.load(self.run_dir)
        run = computed_by(stored.run, self.engine, num_workers=self.num_workers)
        set_threads(run.engine)
        from fedsim.evaluate import SPLITS, evaluate_run
        from fedsim.run import Console, loss_in_words

        result = evaluate_run(stored, run, Console())
        if not self.json:
            for split, metric in SPLITS.items():
                if metric in result:
                    loss = loss_in_words(result[metric], result["loss_unit"])
                    print(wrapped(f"loss on {SPLIT_NAMES[split]}: {loss}"))
            print(f"of {result['checkpoint']}. No noise was added: do not publish this.")
        return result


@dataclasses.dataclass(frozen=True)
class Generate(ReadsModel):
    """Write text with a run's last checkpoint, or with a pretrained model.

    With --num-texts, write a data set of texts to --out. Sampling costs nothing beyond the run: the
    set has the run's epsilon, however large it is. OUT.about.json says what is promised and how the
    texts were made.
    """

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, or hf:NAME."""

    how: Flat[Sampling]

    prompt: str = ""
    """Beginning of the text; for a model with a chat template, what the user says. Default: none,
    plain text from its first token on."""

    plain: bool = False
    """Continue prompts as plain text although the model has a chat template."""

    num_tokens: int = 64
    """Largest number of tokens to write. >= 1."""

    seed: int = 0
    """Seed of the draw: another seed gives another text."""

    num_texts: int | None = None
    """Data set: number of texts. >= 1."""

    out: Path | None = None
    """Data set: file to write, ending in .parquet or .jsonl. A row has a text; with --prompts, a
    prompt and a completion, or messages if the model has a chat template."""

    prompts: Path | None = None
    """Data set: file of prompts, which are used in turn. .txt: one in each line. .jsonl: objects
    with a prompt, or with messages, which need a chat template. Nothing protects people whose texts
    became prompts. Default: none."""

    engine: Literal["ray", "local"] = "ray"
    """Data set: where to sample, as in train. The texts are the same."""

    num_workers: int | None = None
    """Data set: number of worker processes of --engine ray, as in train."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        if self.num_texts is not None:
            return self._data_set(self.num_texts)
        for name in ("out", "prompts", "num_workers"):
            value = getattr(self, name)
            expect(name, value, value is None, "--num-texts beside it")
        from fedsim.generate import generate_text

        how = {"num_tokens": self.num_tokens, "how": self.how, "seed": self.seed}
        result = generate_text(self.model, self.prompt, **how, plain=self.plain)
        if not self.json:
            text = ("" if result["is_reply"] else result["prompt"]) + result["text"]
            print(printable(text, "\n\t") if sys.stdout.isatty() else text)
            if result["stopped"] == "length":
                print(f"(the model's length is {result['max_length']} tokens)", file=sys.stderr)
        return result

    def _data_set(self, num_texts: int) -> dict[str, Any]:
        from fedsim.engine import keep_memory, set_threads

        expect("out", self.out, self.out is not None, "a file to write, with --num-texts")
        assert self.out is not None
        expect("prompt", self.prompt, not self.prompt, "--prompts FILE, with --num-texts")
        engine = EngineConfig(kind=self.engine, num_workers=self.num_workers)
        set_threads(engine)
        keep_memory()
        from fedsim.generate import generate_texts
        from fedsim.run import Console

        result = generate_texts(
            self.model,
            self.out,
            num_texts,
            prompts=self.prompts,
            num_tokens=self.num_tokens,
            how=self.how,
            seed=self.seed,
            engine=engine,
            console=Console(),
            plain=self.plain,
        )
        if not self.json:
            print(wrapped(result["claim"]))
            for fact in result["outside"]:
                print(wrapped(f"Not covered by the guarantee: {fact}."))
            if self.prompts is not None:
                print(wrapped(f"The prompts are {result['prompts']}."))
            print(f"{result['num_texts']:,} texts, written to {result['file']}")
        return result


@dataclasses.dataclass(frozen=True)
class Export(ReadsModel):
    """Write a model in Hugging Face's format: config.json, safetensors, tokenizer.json."""

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, or hf:NAME."""

    out: Path
    """Directory to create."""

    adapter: bool = False
    """Write only the adapters of a LoRA run, in PEFT's format. Without this flag they are merged
    into the model."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.export import export

        result = export(self.model, self.out, adapter=self.adapter)
        if not self.json:
            print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
        return result
