"""Commands that make a model or use one: `fedsim train`, `evaluate`, `generate`, `export`."""

import sys
from pathlib import Path
from typing import Any, Literal

from fedsim.cli import Answer
from fedsim.config import (
    Algorithm,
    EngineConfig,
    Positional,
    PrivacyConfig,
    RunConfig,
    Sampling,
    changed_run,
)
from fedsim.errors import expect, printable
from fedsim.files import near
from fedsim.run import Terminal


def train(
    algorithm: Positional[Literal["els", "uls"]],
    privacy: PrivacyConfig,
    run: RunConfig,
    config: Path | None = None,
    dry_run: bool = False,
) -> Answer:
    """Fine-tune a model with user-level differential privacy.

    els samples and clips examples (DP-SGD-ELS), uls samples and clips users (DP-SGD-ULS); both
    protect all texts of a user. `fedsim recommend` helps to choose. A run that was stopped or
    killed resumes with the same command and --resume.

    Args:
      algorithm: els or uls.
      config: A TOML, YAML or JSON file with defaults for any of these flags (num_steps = 200; in
        YAML num_steps: 200); flags override it.
      dry_run: Show the plan, its noise and the size of a step, without training.
    """
    Terminal().note(f"reading data={run.data.source}")
    from fedsim.engine import keep_memory, set_threads

    if dry_run:  # which needs no worker
        run = changed_run(run, engine="local", accelerator="auto")
    set_threads(run.engine)
    keep_memory()
    from fedsim import training
    from fedsim.run import Console, directory, ledger

    console = Console()
    if dry_run:
        return training.dry_run(Algorithm(algorithm), privacy, run, console), []
    if run.resume and not (run.run_dir / directory.CONFIG).exists():
        other = near(run.run_dir, f"*/{ledger.FILE}").replace("such as", "but in", 1)
        console.note(f"no run in {run.run_dir} yet{other}: a new one begins")
    summary = training.train(Algorithm(algorithm), privacy, run, console)
    console.summary(summary, run.run_dir)
    return summary, []


def evaluate(run_dir: Positional[Path]) -> Answer:
    """Compute the loss of a run's last checkpoint on all held-out texts, without noise.

    Do not publish it. Losses that may be published come from a training with --eval-epsilon.

    Args:
      run_dir: The run's directory.
    """
    Terminal().note(f"reading run={run_dir}")
    from fedsim.engine import set_threads
    from fedsim.run import directory

    stored = directory.load(run_dir)
    run = changed_run(stored.run, engine="local", accelerator="auto")
    set_threads(run.engine)
    from fedsim.evaluate import SPLITS, evaluate_run
    from fedsim.run import Console

    result = evaluate_run(stored, run, Console())
    metrics = [name for name in SPLITS.values() if name in result]
    lines = [f"{name} {result[name]:.4g} {result['loss_unit']}" for name in metrics]
    return result, [*lines, f"of {result['checkpoint']}. No noise was added: do not publish this."]


def generate(
    model: Positional[str],
    how: Sampling,
    prompt: str = "",
    max_tokens: int = 64,
    seed: int = 0,
    num_texts: int | None = None,
    out: Path | None = None,
    prompts: Path | None = None,
    engine: Literal["ray", "local"] = "ray",
    num_workers: int | None = None,
) -> Answer:
    """Write text with a run's last checkpoint, or with a pretrained model.

    With --num-texts, write a data set of texts to --out. Sampling costs nothing beyond the run: the
    set has the run's epsilon, however large it is. OUT.about.json says what is promised and how the
    texts were made.

    Args:
      model: The directory of a run, a Hugging Face directory, or hf:NAME.
      how: how tokens are drawn.
      prompt: Beginning of the text; for a model with a chat template, what the user says. Default:
        none, plain text from its first token on.
      max_tokens: Largest number of tokens to write. >= 1.
      seed: Seed of the draw: another seed gives another text.
      num_texts: Data set: number of texts. >= 1.
      out: Data set: file to write, ending in .parquet. A row has a text; with --prompts, a prompt
        and a completion, or messages if the model has a chat template.
      prompts: Data set: .jsonl file of prompts, which are used in turn: objects with a prompt, or
        with messages, which need a chat template. Nothing protects people whose texts became
        prompts. Default: none.
      engine: Data set: where to sample, as in train. The texts are the same.
      num_workers: Data set: number of worker processes of --engine ray, as in train.
    """
    Terminal().note(f"reading model={model}")
    drawn: dict[str, Any] = {"max_tokens": max_tokens, "how": how, "seed": seed}
    if num_texts is None:
        for name, value in {"out": out, "prompts": prompts, "num_workers": num_workers}.items():
            expect(name, value, value is None, "num_texts beside it")
        from fedsim.generate import generate_text

        result = generate_text(model, prompt, **drawn)
        text = ("" if result["is_reply"] else result["prompt"]) + result["text"]
        return result, [printable(text, "\n\t") if sys.stdout.isatty() else text]
    expect("out", out, out is not None, "a file to write, with num_texts")
    assert out is not None
    expect("prompt", prompt, not prompt, "prompts=FILE, with num_texts")
    from fedsim.engine import keep_memory, set_threads

    # A worker draws many texts before it answers.
    where = EngineConfig(kind=engine, num_workers=num_workers, worker_timeout=21_600.0)
    set_threads(where)
    keep_memory()
    from fedsim.generate import generate_texts
    from fedsim.run import Console

    result = generate_texts(
        model, out, num_texts, prompts=prompts, **drawn, engine=where, console=Console()
    )
    outside = [f"Not covered by the guarantee: {fact['text']}." for fact in result["outside"]]
    if prompts is not None:
        outside.append(f"The prompts are {result['prompts']}.")
    written = f"{result['num_texts']:,} texts, written to {result['file']}"
    return result, [result["claim"], *outside, written]


def export(model: Positional[str], out: Path, adapter: bool = False) -> Answer:
    """Write a model in Hugging Face's format: config.json, safetensors, tokenizer.json.

    Weights have the type of the model that the run started from. Exit code 1 if the model card of a
    run claims no privacy; the files are written, and the reason is printed.

    Args:
      model: The directory of a run, a Hugging Face directory, or hf:NAME.
      out: Directory to create.
      adapter: Write only the adapters of a LoRA run, in PEFT's format. Without this flag they are
        merged into the model.
    """
    Terminal().note(f"reading model={model}")
    from fedsim.export import export as export_model

    result = export_model(model, out, adapter=adapter)
    if result["reason"]:
        Terminal().warn(f"the model card claims no privacy: {result['reason']}")
    return result, [f"{name} {result[name]}" for name in ("out", "format", "next")]
