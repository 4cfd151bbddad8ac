"""Settings that cannot change the privacy guarantee: data, model, optimizer, engine, results; and
those of builds, audits and generation."""

import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from fedsim.config.model import HIDDEN, APath, Count, Length, Names, Positive, Share, group
from fedsim.errors import expect
from fedsim.files import expand_home

# May differ between a run and its resumption: they change neither the guarantee nor the bits. (That
# the data is the same is checked by its fingerprint, wherever it lies.)
OPERATIONAL = frozenset(
    {"data", "run_dir", "engine", "num_workers", "num_lanes", "threads_per_worker", "resume"}
    | {"wait_for_workers", "worker_timeout"}
    | {"checkpoint_every", "output", "budget_ledger", "limit_epsilon"}
    | {"log_to", "strict"}
)

ALL_LINEAR = "all-linear"
"""All modules of the blocks that LoRA can adapt, as PEFT says it."""


class Unasked(StrEnum):
    """Defaults, which can be told from the same text where a person gave it."""

    MODEL = "tiny"

    def __repr__(self):  # in signatures
        return repr(self.value)


LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

UPDATE = ("optimizer", "learning_rate", "schedule", "ema")
"""Settings of a RunConfig that are None where the defaults depend on the noise."""
PLANNED = (*UPDATE, "eval_examples")
"""Settings of a RunConfig that are None until there is a plan."""
EVAL_EXAMPLES = 32, 512  # the fewest and the most by default


def _home(field: str) -> BeforeValidator:
    """~ of a path or name of a source as the home directory, which no file of settings expands."""
    return BeforeValidator(lambda x: expand_home(field, x) if isinstance(x, str | Path) else x)


@group()
class BuildConfig:
    """Reading, owners and tokens of texts.

    With the sources, they determine the bytes of the data set."""

    user_column: Names = ()
    """Column with the user of a row. A column of lists gives a text to several users. Default:
    user_id."""

    owners: Names = ()
    """Columns, separated by commas, for texts with several owners: a text belongs to everyone who
    is in one of them, as in from,to,cc. Instead of user_column."""

    rows_without_user: Literal["refuse", "drop"] = "refuse"
    """Refuse data with rows without a user, or drop these rows."""

    text_column: Names = ()
    """Column with the text. Default: text."""

    messages_column: str | None = None
    """Column with chats: lists of {role, content}, or of {from, value}. Columns named messages,
    conversations, prompt and completion, or instruction and output are recognised if there is no
    text."""

    prompt_column: str | None = None
    """Column with prompts: texts, or lists of messages. Goes with completion_column."""

    completion_column: str | None = None
    """Column with the completions of the prompts."""

    train_on: Literal["all", "completion", "assistant"] | None = None
    """Tokens of chats to train on. completion: of a chat, the assistant's last turn. Default: the
    completion of a prompt, and the assistant's turns of a chat."""

    chat_template: APath | None = None
    """File with the chat template, or chatml-tools: ChatML with tools and calls. Default: the one
    in the directory of the tokenizer."""

    skip_unknown: bool = False
    """Leave out chats that cannot be read, with images for example, and count them.
    Default: the first one is an error that names its row."""

    order_column: str | None = None
    """Column that orders a user's examples: numbers, or times such as 2020-01-31T10:00:00Z.
    Default: the order of the files."""

    tokenizer: Annotated[str, _home("tokenizer")] = "bytes"
    """bytes, hf:NAME, a tokenizer file, or the directory of a model or a run that holds one."""

    tokenizer_is_public: bool = False
    """State that none of these texts was read to make the tokenizer. Without it, a tokenizer file
    is named as outside the guarantee. bytes and the tokenizers of models need no statement."""

    max_length: Length = 128
    """Largest number of tokens of an example, the token at its beginning included. >= 2."""

    long_texts: Literal["cut", "split"] = "cut"
    """Cut texts of more than max_length tokens, or split them into several examples of the user. A
    chat is never split: then it is its end, if all that is trained on is there."""

    eval_users: Share = 0.05
    """Share of users held out of training, to evaluate on; chosen by a hash of their ids. In [0,
    1)."""

    eval_examples: bool = True
    """Also hold out a tenth of each training user's examples, at most 32."""

    min_examples: Count = 1
    """Leave out users with fewer examples than this. >= 1."""

    test_from: str | None = None
    """Put rows whose order_column is at least this (such as 2018-01-01) into the split test."""

    quoting: Literal["none", "minimal"] | None = None
    """Meaning of quotation marks in CSV. minimal: they enclose values with delimiters or line ends.
    none: they are ordinary characters. Default: minimal, but a file that can be read either way is
    refused."""

    def __post_init__(self):
        for name in ("user_column", "text_column"):
            shown, number = ",".join(getattr(self, name)), len(getattr(self, name))
            expect(name, shown, number <= 1, "one column; a view in SQL makes one of several")
        alone = not self.owners or not self.user_column
        beside = f"none beside owners={','.join(self.owners)}"
        expect("user_column", ",".join(self.user_column), alone, beside)


@group(source="data")
class DataConfig:
    """The training text and its users."""

    source: Annotated[str, _home("data")]
    """Data to train on: a directory made by `fedsim data build`, which has more settings; a
    Parquet, JSON or CSV file or a folder of them (of JSON: 'folder/*.json'), hf:NAME (a data set of
    the Hugging Face Hub), or for trials pydocs (docstrings)."""

    user_column: str | None = None
    """Column with the id of the user who owns the row, where data names files. Default: user_id."""

    text_column: str | None = None
    """Column with the text, where data names files. Default: text."""

    messages_column: str | None = None
    """Column with chats, where data names files: lists of {role, content}, or of {from, value}.
    Default: the columns messages, conversations, or prompt and completion, if there is no text."""

    tokenizer: Annotated[str, _home("tokenizer")] | None = None
    """Tokenizer, where data names files: bytes, hf:NAME, or a tokenizer file. Default: the model's,
    or bytes for a new model."""

    max_length: Length | None = None
    """Sequence length in tokens, where data names files; longer texts are truncated. >= 2. Default:
    128."""

    def __post_init__(self):
        expect("data", self.source, self.source != "", "a directory, files, or pydocs")

    @property
    def options(self) -> dict[str, Any]:
        """The given options for reading files: keyword arguments of `corpora.load`."""
        return {name: x for name, x in vars(self).items() if name != "source" and x is not None}


def _joined(modules: str | Sequence[str]) -> str:
    """Names of modules with commas between them."""
    return modules if isinstance(modules, str) else ",".join(modules)


@group(source="model")
class ModelConfig:
    """The model to train."""

    source: Annotated[str, _home("model")] = Unasked.MODEL
    """Model to train. A new transformer: micro (to try a command), tiny, small, medium, paper (350
    M parameters) or large (1 B). Or a pretrained model: a Hugging Face directory, hf:NAME, or the
    directory of an earlier run."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of LoRA adapters, which are trained in place of the parameters of a pretrained model. >=
    0; 0 trains all parameters."""

    lora_modules: Annotated[str | Sequence[str], AfterValidator(_joined)] = ALL_LINEAR
    """Modules of each block that get LoRA adapters, by PEFT's names, such as q_proj v_proj;
    all-linear: all of them."""

    lora_alpha: Positive | None = None
    """alpha of LoRA adapters, for their scale (see lora_scaling). > 0. Default: twice the rank;
    with rslora, 8."""

    lora_scaling: Literal["standard", "rslora"] = "standard"
    """Factor of the output of LoRA adapters. standard: alpha / rank. rslora: alpha / sqrt(rank)."""

    frozen_dtype: Literal["stored", "float32", "bfloat16", "int8"] = "stored"
    """Type of the matrices of the model beneath LoRA adapters. stored: as in its files, so that
    bfloat16 stays bfloat16. int8: 1 byte a weight, and a scale for each output channel. bfloat16
    and int8 round the model, also the merged one. Changes the bits of the result."""

    remat: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less accelerator memory,
    more time. Changes the bits of the result."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass. Parameters, norms, sums and noise are always
    float32."""

    def __post_init__(self):
        dtype, trained = self.frozen_dtype, self.lora_rank == 0
        expected = "stored or float32 without lora_rank: trained parameters are float32"
        expect("frozen_dtype", dtype, not trained or dtype in ("stored", "float32"), expected)


@group(source="engine")
class EngineConfig:
    """The processes that compute gradients."""

    kind: Literal["ray", "local"] = "ray"
    """ray: worker processes on the Ray cluster at RAY_ADDRESS, or on this machine. local: this
    process alone."""

    num_workers: Count | None = None
    """Number of worker processes. >= 1. Default: one per accelerator, or one per threads_per_worker
    CPUs."""

    num_lanes: Annotated[Count, HIDDEN] = 8
    """Number of parts that a step is split into; each worker computes one at a time. >= 1. Without
    noise, changes the bits of the result."""

    threads_per_worker: Count = 1
    """CPU threads of each worker. >= 1. Changes the bits of the result: 1 thread gives others than
    several."""

    strategy: Literal["auto", "scan", "direct", "ghost"] = "auto"
    """Method of computing clipped gradients. auto: ghost for ELS on CPUs if all parameters are
    trained and there are 10 million or more, else direct. Changes the bits of the result."""

    rows_per_pass: Count | None = None
    """Rows of one forward and backward pass: more take more memory. >= 1. Changes the bits of the
    result. Default: 4 on CPUs; on accelerators as many as have 8,192 tokens."""

    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Hardware of the workers. auto: the accelerators present in the cluster when the workers
    start; name one if nodes are still to join."""

    wait_for_workers: Annotated[float, Field(ge=0, lt=math.inf)] = 0.0
    """Seconds to wait for nodes until num_workers fit, and later for workers that were lost, at
    least worker_timeout; Ray asks an autoscaler for nodes. >= 0. 0: they must fit at the start."""

    worker_timeout: Positive = 600.0
    """Seconds that a Ray worker has for one part of a step, its compilation included, and to start.
    A worker that takes longer counts as hung: it is ended and started again, and its part is
    computed again. A part that takes too long 4 times ends the run. > 0."""


@group(kw_only=True)
class UpdateConfig:
    """The optimizer."""

    optimizer: str | None = None
    """momentum (SGD with momentum 0.9), or any optax optimizer by name, such as adafactor, adam or
    sgd, optionally with its options: adam:b1=0.8,eps=1e-6. Default: momentum."""

    learning_rate: Positive | None = None
    """Learning rate, or its peak with a schedule. > 0. Default: computed from the noise,
    for momentum and sgd; 0.1 for adafactor, 0.01 for adam and adamw."""

    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate over the steps: constant, or linear or cosine decay to zero at the last step.
    Default: constant."""

    ema: Share | None = None
    """Decay factor per step of an exponential moving average of the parameters, which is evaluated
    and released at no privacy cost. In [0, 1); 0 uses the parameters of the last step. Default: 1 -
    10 / num_steps, at least 0."""


@group(kw_only=True)
class RunConfig(UpdateConfig):
    """Settings that cannot change the privacy guarantee."""

    data: DataConfig

    run_dir: Annotated[APath, _home("run_dir")]
    """Directory for the results: configuration, ledger, metrics, TensorBoard logs, checkpoints,
    summary."""

    model: ModelConfig = ModelConfig()

    seed: int | None = None
    """Seed for a reproducible run. Whoever knows or guesses it can remove the noise, so such a run
    has no guarantee, and the privacy budget counts it as infinite for its users (see
    budget_ledger). Default: a secret random key."""

    engine: EngineConfig = EngineConfig()

    eval_every: Count | None = None
    """Steps between evaluations. >= 1. Default: a tenth of the run, and at least as many as
    have 64 gradients."""

    eval_examples: Count | None = None
    """Number of examples of each held-out split per evaluation, the same each time. >= 1. Default:
    half the gradients between two evaluations, but at least 32 and at most 512; 512 with
    eval_epsilon."""

    checkpoint_every: Count = 10
    """Steps between checkpoints. >= 1. If this takes longer than a minute, there is one every
    minute, too. A crash costs the steps since the last one: at most about twice as many, or two
    minutes and a step. They are paid for, and no other steps take their place."""

    output: Annotated[Literal["quiet", "normal"], HIDDEN] = "normal"
    """Messages on stderr. quiet: warnings and errors. normal: plan, progress and results, too.
    --quiet is short for it."""

    log_to: Annotated[tuple[LoggerName, ...], Strict(False)] = ("tensorboard",)
    """Loggers of the metrics, any of tensorboard, wandb, mlflow and trackio. tensorboard writes
    files into run_dir. The others can send what they get to another machine, so they get only the
    plan, epsilon and metrics that have noise. metrics.jsonl in run_dir has all metrics in any
    case."""

    strict: bool = False
    """Refuse whatever would need a footnote to the guarantee, with the setting that needs none.
    Held-out users are then evaluated with eval_epsilon or not at all."""

    resume: bool = False
    """Resume the run in run_dir, or start it if there is none."""

    budget_ledger: Annotated[APath, _home("budget_ledger")] | None = None
    """Directory of the budget ledger, which counts the privacy loss of all runs on the same users.
    Default: the environment variable FEDSIM_BUDGET_LEDGER, or ~/.local/state/fedsim/budget."""

    limit_epsilon: Positive | None = None
    """Refuse the run if all runs on these users, including this one, could cost a user more than
    this epsilon at this run's delta. > 0. Default: the limits set in the budget ledger."""

    def evaluated_every(self, num_steps: int, batch_size: int) -> int:
        """Steps between evaluations of a run of T steps."""
        # Evaluations of two splits read no more rows than the steps between them.
        return self.eval_every or max(-(-num_steps // 10), -(-2 * EVAL_EXAMPLES[0] // batch_size))


@group()
class AuditConfig:
    """Canaries that an audit plants, and the confidence of its tests."""

    gradient_canaries: Count = 400
    """Number of made-up users whose gradient always points in a direction of their own; each is
    included with probability 1/2. >= 1. More canaries can refute larger epsilons: 32 can refute 8
    at delta 1e-6."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.999
    """Confidence of a refutation. In [0.5, 1)."""


@group()
class Sampling:
    """How tokens are drawn from the model.

    The fields apply in their order."""

    temperature: float = 1.0
    """Divides the logits. 0, which always takes the likeliest token, or >= 0.001."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the fewest likeliest tokens that have this probability together. In (0, 1]."""

    def __post_init__(self):
        heat = self.temperature
        expect("temperature", heat, heat == 0 or 1e-3 <= heat < math.inf, "0, or >= 0.001")
