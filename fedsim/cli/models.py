"""Commands that make a model or use one: `fedsim train`, `evaluate`, `pretrain`, `personalize`,
`generate`, `chat`, `export`, `tokenizer`."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsModel, ReadsRun, ReadsSources
from fedsim.config import (
    Algorithm,
    EngineConfig,
    Filters,
    Personalization,
    PretrainConfig,
    PrivacyConfig,
    RunConfig,
    Sampling,
    Synthesis,
    changed_run,
    computed_by,
)
from fedsim.errors import printable
from fedsim.run import wrapped

PRIVATE = "what was measured without noise, not to be published"
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
class Pretrain(ReadsSources):
    """Train on public text WITHOUT privacy, to make a model for `train --model`.

    Users play no part. The learning rate rises to --learning-rate, then falls to zero along a
    cosine.
    """

    pretrain: Flat[PretrainConfig]
    run: Flat[RunConfig]

    config: Path | None = None
    """A TOML or YAML file with defaults for any of these flags (num_steps = 200; in YAML
    num_steps: 200); flags override it."""

    json: bool = False
    """Print the content of summary.json on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.training import pretrain

        return pretrain(self.pretrain, self.run, Console(log_every=self.run.log_every))


@dataclasses.dataclass(frozen=True)
class Personalize(ReadsRun):
    """Compare the loss on held-out users with and without personalization.

    Personalization is SGD on half of a user's examples, from the run's last checkpoint; both losses
    are of the other half. The losses have no noise: do not publish them."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    how: Flat[Personalization]

    split: Literal["eval_users", "test"] = "eval_users"
    """Which texts. eval_users: those of held-out users. test: later examples (--test-from of
    data build)."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.run import directory

        stored = directory.load(self.run_dir)
        run = computed_by(stored.run)
        set_threads(run.engine)
        from fedsim.run import Console
        from fedsim.training import personalize_run

        result = personalize_run(stored, run, Console(), split=self.split, settings=self.how)
        del result["per_user"]  # losses of single persons
        if not self.json:
            from fedsim.run import loss_in_words

            unit = result["loss_unit"]
            print(
                f"loss of {result['num_users']:,} users: {loss_in_words(result['loss'], unit)}",
                f"personalized, learning rate {result['learning_rate']:g}: "
                f"{loss_in_words(result['personalized_loss'], unit)}",
                f"standard error of the gain: {result['gain_error']:.2g}",
                sep="\n",
            )
        return result


@dataclasses.dataclass(frozen=True)
class Generate(ReadsModel):
    """Write text with a run's last checkpoint, or with a pretrained model."""

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, or hf:NAME."""

    how: Flat[Sampling]

    prompt: str = ""
    """Beginning of the text."""

    num_tokens: int = 64
    """Largest number of tokens to write. >= 1."""

    seed: int = 0
    """Seed of the draw: another seed gives another text."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.generate import generate_text

        result = generate_text(
            self.model,
            self.prompt,
            num_tokens=self.num_tokens,
            how=self.how,
            seed=self.seed,
        )
        if not self.json:
            text = result["prompt"] + result["text"]
            print(printable(text, "\n\t") if sys.stdout.isatty() else text)
            if result["stopped"] == "length":
                print(f"(the model's length is {result['max_length']} tokens)", file=sys.stderr)
        return result


@dataclasses.dataclass(frozen=True)
class Synthesize(ReadsModel):
    """Write a data set of texts sampled from a run's model, to share, label and train on.

    Sampling costs nothing beyond the run: the set has the run's epsilon, however large it is.
    FILE.about.json says what is promised and how the texts were made. A set from a model without a
    guarantee is called NAME.no-guarantee.
    """

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, or hf:NAME."""

    out: Path
    """File to write, ending in .parquet or .jsonl."""

    texts: Flat[Synthesis]
    how: Flat[Sampling]
    filters: Flat[Filters]

    measure: bool = False
    """Also measure, from users' texts, how good the set is and whether training users' texts are in
    it. NAME_private.html has what was found, without noise: do not publish it."""

    eval_epsilon: float | None = None
    """With --measure: release the loss of a small model that is trained on the set, for this cost
    to each held-out user, and show it on the set's page. > 0. Default: no release."""

    resume: bool = False
    """Go on with what an interrupted command left beside the file."""

    engine: Literal["ray", "local"] = "ray"
    """ray: worker processes on the Ray cluster at RAY_ADDRESS, or on this machine. local: this
    process alone. The texts are the same."""

    num_workers: int | None = None
    """Number of worker processes. >= 1. Default: one per accelerator, or one per threads_per_worker
    CPUs."""

    threads_per_worker: int = 1
    """CPU threads of each worker. >= 1. Changes the texts: 1 thread gives others than several."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import keep_memory, set_threads

        workers = {"num_workers": self.num_workers, "threads_per_worker": self.threads_per_worker}
        engine = EngineConfig(kind=self.engine, **workers)
        set_threads(engine)
        keep_memory()
        from fedsim.run import Console
        from fedsim.synthesis import synthesize

        where = (self.model, self.out, self.texts, self.how, engine, Console())
        result = synthesize(
            *where,
            filters=self.filters,
            measured=self.measure,
            eval_epsilon=self.eval_epsilon,
            resume=self.resume,
        )
        if not self.json:
            dropped = sum(result["dropped"].values())
            left_out = f", {dropped:,} thrown away" if dropped else ""
            print(wrapped(result["claim"]))
            for fact in result["outside"]:
                print(wrapped(f"Not covered by the guarantee: {fact}."))
            print(f"{result['kept']:,} texts{left_out}; written to {result['file']}")
            for name, what in (("page", "the page that goes with it"), ("private_page", PRIVATE)):
                if result.get(name):
                    print(f"{what}: {result[name]}")
        return result


@dataclasses.dataclass(frozen=True)
class Chat(ReadsModel):
    """Chat with a model in the terminal, in the form of its chat template.

    Ctrl-C ends a reply; Ctrl-D or /exit ends the chat. Lines of a pipe are messages, too.
    """

    model: tyro.conf.Positional[str]
    """The directory of a run, a Hugging Face directory, or hf:NAME."""

    system: str = ""
    """The system's message, which the model reads before the chat. Default: none."""

    temperature: float = 1.0
    """Divides the logits. 0, which always takes the likeliest token, or >= 0.001."""

    max_tokens: int = 256
    """Largest number of tokens of a reply. >= 1."""

    seed: int = 0
    """Seed of the draw: another seed gives other replies."""

    json: bool = False
    """Print the messages as one JSON object on stdout at the end, instead of the replies."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.chat import chat

        return chat(
            self.model,
            silent=self.json,
            system=self.system,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )


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


@dataclasses.dataclass(frozen=True)
class TrainTokenizer:
    """Train a byte-level BPE tokenizer on texts that a protected model wrote.

    Unlike wordpiece:SIZE and bpe:SIZE of `fedsim data build`, it sees no user's text, so it costs
    nothing beyond the run. The run has to have a guarantee. Beside FILE.json, FILE.provenance.json
    says where the tokenizer comes from; data sets built with it say so, too.
    """

    run_dir: Annotated[Path, tyro.conf.arg(name="from")]
    """Directory of the run whose model writes the texts."""

    out: Path
    """File to write, ending in .json; for --tokenizer of `fedsim data build`."""

    vocab_size: int = 8000
    """Largest number of pieces. >= 300 and < 10,000,000."""

    samples: int = 4096
    """Number of texts to sample. >= 1."""

    num_tokens: int = 128
    """Largest number of tokens of a text, in the tokens of the run. >= 1."""

    seed: int = 0
    """Seed of the samples. It is public: another seed gives another tokenizer."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"sampling texts from run={self.run_dir}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.generate import train_tokenizer

        result = train_tokenizer(
            self.run_dir,
            self.out,
            vocab_size=self.vocab_size,
            samples=self.samples,
            num_tokens=self.num_tokens,
            seed=self.seed,
        )
        if not self.json:
            pieces, characters = result["vocab_size"], result["characters"]
            print(f"{pieces:,} pieces, from {characters:,} characters: {result['origin']}")
            print(f"written to {result['out']}")
        return result
