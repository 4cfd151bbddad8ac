"""Commands that make a model or use one: `fedsim train`, `evaluate`, `generate`, `export`."""

import sys
from pathlib import Path
from typing import Any, Literal

from fedsim.config import (
    Algorithm,
    EngineConfig,
    Positional,
    PrivacyConfig,
    RunConfig,
    Sampling,
    changed_run,
    computed_by,
)
from fedsim.errors import expect, printable
from fedsim.run import Terminal

SPLIT_NAMES = {
    "eval_users": "held-out users",
    "eval_examples": "held-out examples of training users",
    "test": "the test split",
}


def train(
    algorithm: Positional[Literal["els", "uls"]],
    privacy: PrivacyConfig,
    run: RunConfig,
    config: Path | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Fine-tune a model with user-level differential privacy.

    els samples and clips examples (DP-SGD-ELS), uls samples and clips users (DP-SGD-ULS); both
    protect all texts of a user. `fedsim recommend` helps to choose. A run that was stopped or
    killed resumes with the same command and --resume.

    Args:
      algorithm: els or uls.
      config: A TOML, YAML or JSON file with defaults for any of these flags (num_steps = 200; in
        YAML num_steps: 200); flags override it.
      dry_run: Show the plan, its noise and the size of a step, without training.
      json: Print the content of summary.json on stdout; with --dry-run, the plan.
    """
    Terminal().note(f"reading data={run.data.source}, model={run.model.source}")
    from fedsim.engine import keep_memory, set_threads

    if dry_run:  # which needs no worker
        run = changed_run(run, engine="local", accelerator="auto")
    set_threads(run.engine)
    keep_memory()
    from fedsim import training
    from fedsim.run import Console

    console = Console()
    if dry_run:
        return training.dry_run(Algorithm(algorithm), privacy, run, console)
    summary = training.train(Algorithm(algorithm), privacy, run, console)
    console.summary(summary, run.run_dir)
    return summary


def evaluate(
    run_dir: Positional[Path],
    engine: Literal["ray", "local"] = "local",
    num_workers: int | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Compute the loss of a run's last checkpoint on all held-out texts, without noise.

    Do not publish it. Losses that may be published come from a training with --eval-epsilon.

    Args:
      run_dir: The run's directory.
      engine: Where to compute, as in train.
      num_workers: Number of worker processes of --engine ray, as in train.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"reading run={run_dir}")
    from fedsim.engine import set_threads
    from fedsim.run import directory

    stored = directory.load(run_dir)
    run = computed_by(stored.run, engine, num_workers=num_workers)
    set_threads(run.engine)
    from fedsim.evaluate import SPLITS, evaluate_run
    from fedsim.run import Console

    result = evaluate_run(stored, run, Console())
    if not json:
        for split, metric in SPLITS.items():
            if metric in result:
                loss = f"{result[metric]:.4g} {result['loss_unit']}"
                print(f"loss on {SPLIT_NAMES[split]}: {loss}")
        print(f"of {result['checkpoint']}. No noise was added: do not publish this.")
    return result


def generate(
    model: Positional[str],
    how: Sampling,
    prompt: str = "",
    plain: bool = False,
    num_tokens: int = 64,
    seed: int = 0,
    num_texts: int | None = None,
    out: Path | None = None,
    prompts: Path | None = None,
    engine: Literal["ray", "local"] = "ray",
    num_workers: int | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Write text with a run's last checkpoint, or with a pretrained model.

    With --num-texts, write a data set of texts to --out. Sampling costs nothing beyond the run: the
    set has the run's epsilon, however large it is. OUT.about.json says what is promised and how the
    texts were made.

    Args:
      model: The directory of a run, a Hugging Face directory, or hf:NAME.
      how: how tokens are drawn.
      prompt: Beginning of the text; for a model with a chat template, what the user says. Default:
        none, plain text from its first token on.
      plain: Continue prompts as plain text although the model has a chat template.
      num_tokens: Largest number of tokens to write. >= 1.
      seed: Seed of the draw: another seed gives another text.
      num_texts: Data set: number of texts. >= 1.
      out: Data set: file to write, ending in .parquet or .jsonl. A row has a text; with --prompts,
        a prompt and a completion, or messages if the model has a chat template.
      prompts: Data set: file of prompts, which are used in turn. .txt: one in each line. .jsonl:
        objects with a prompt, or with messages, which need a chat template. Nothing protects people
        whose texts became prompts. Default: none.
      engine: Data set: where to sample, as in train. The texts are the same.
      num_workers: Data set: number of worker processes of --engine ray, as in train.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"reading model={model}")
    if num_texts is None:
        for name, value in {"out": out, "prompts": prompts, "num_workers": num_workers}.items():
            expect(name, value, value is None, "num_texts beside it")
        from fedsim.generate import generate_text

        drawn = {"num_tokens": num_tokens, "how": how, "seed": seed}
        result = generate_text(model, prompt, **drawn, plain=plain)
        if not json:
            _show_text(result)
        return result
    expect("out", out, out is not None, "a file to write, with num_texts")
    assert out is not None
    expect("prompt", prompt, not prompt, "prompts=FILE, with num_texts")
    from fedsim.engine import keep_memory, set_threads

    where = EngineConfig(kind=engine, num_workers=num_workers)
    set_threads(where)
    keep_memory()
    from fedsim.generate import generate_texts
    from fedsim.run import Console

    result = generate_texts(
        model,
        out,
        num_texts,
        prompts=prompts,
        num_tokens=num_tokens,
        how=how,
        seed=seed,
        engine=where,
        console=Console(),
        plain=plain,
    )
    if not json:
        print(result["claim"])
        for fact in result["outside"]:
            print(f"Not covered by the guarantee: {fact['text']}.")
        if prompts is not None:
            print(f"The prompts are {result['prompts']}.")
        print(f"{result['num_texts']:,} texts, written to {result['file']}")
    return result


def _show_text(result: dict[str, Any]) -> None:
    text = ("" if result["is_reply"] else result["prompt"]) + result["text"]
    print(printable(text, "\n\t") if sys.stdout.isatty() else text)
    if result["stopped"] == "length":
        print(f"(the model's length is {result['max_length']} tokens)", file=sys.stderr)


def export(
    model: Positional[str], out: Path, adapter: bool = False, json: bool = False
) -> dict[str, Any]:
    """Write a model in Hugging Face's format: config.json, safetensors, tokenizer.json.

    Args:
      model: The directory of a run, a Hugging Face directory, or hf:NAME.
      out: Directory to create.
      adapter: Write only the adapters of a LoRA run, in PEFT's format. Without this flag they are
        merged into the model.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"reading model={model}")
    from fedsim.export import export as export_model

    result = export_model(model, out, adapter=adapter)
    if not json:
        print(*(f"{name} {value}" for name, value in result.items()), sep="\n")
    return result
