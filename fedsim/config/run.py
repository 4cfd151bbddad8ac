"""Settings that cannot change the privacy guarantee: data, model, optimizer, engine, results."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fedsim.errors import expect, expect_least, expect_positive
from fedsim.files import expand_home

try:
    import tyro.conf

    flag: Any = tyro.conf.arg  # what the command line calls a setting
except ModuleNotFoundError:  # then there is no command line
    flag = dict

# May differ between a run and its resumption: they change neither the guarantee nor the bits. (That
# the data is the same is checked by its fingerprint, wherever it lies.)
OPERATIONAL = frozenset(
    {"data", "run_dir", "engine", "num_workers", "num_lanes", "resume"}
    | {"wait_for_workers", "worker_timeout"}
    | {"checkpoint_every", "log_every", "output", "budget_ledger", "limit_epsilon", "spend_rest"}
    | {"log_to", "log_non_private", "strict"}
)

ALL_LINEAR = "all-linear"
"""All modules of the blocks that LoRA can adapt, as PEFT says it."""

LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

UPDATE = ("optimizer", "learning_rate", "schedule", "ema")
"""Settings of a RunConfig that are None where the recipe sets them."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training text and its users."""

    source: Annotated[str, flag(name="data")]
    """Data to train on: a directory made by `fedsim data build`, a Parquet, JSON or CSV file or a
    folder of them (of JSON: 'folder/*.json'), hf:NAME (a data set of the Hugging Face Hub), or for
    trials pydocs (docstrings)."""

    user_column: str | None = None
    """Column with the id of the user who owns the row, where data names files. Default: user_id."""

    text_column: str | None = None
    """Column with the text, where data names files. Default: text."""

    tokenizer: str | None = None
    """Tokenizer, where data names files: bytes, hf:NAME, or a tokenizer file. Default: the model's,
    or bytes for a new model."""

    max_length: int | None = None
    """Sequence length in tokens, where data names files; longer texts are truncated. >= 2. Default:
    128."""

    messages_column: str | None = None
    """Column with chats, where data names files: lists of {role, content}, or of {from, value}.
    Default: the columns messages, conversations, or prompt and completion, if there is no text."""

    owner_key: str | None = None
    """Key of each turn of a chat that names who speaks, where data names files. The chat belongs to
    all who speak in it; turns of the assistant may name nobody. Instead of user_column."""

    prompt_column: str | None = None
    """Column with prompts, where data names files; with completion_column."""

    completion_column: str | None = None
    """Column with the completions of the prompts."""

    train_on: Literal["all", "completion", "assistant", "user"] | None = None
    """Tokens of chats to train on. completion: of a chat, the assistant's last turn. Default: the
    completion of a prompt, and the assistant's turns of a chat."""

    chat_template: str | None = None
    """File with the chat template. Default: the model's own."""

    def __post_init__(self):
        expect("data", self.source, self.source != "", "a directory, files, or pydocs")
        object.__setattr__(self, "source", expand_home("data", self.source))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", expand_home("tokenizer", self.tokenizer))
        expect_least(self, max_length=2)

    @property
    def options(self) -> dict[str, Any]:
        """The given options for reading files: keyword arguments of `corpora.load`."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "source")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    source: Annotated[str, flag(name="model")] = "tiny"
    """Model to train. A new transformer: micro (to try a command), tiny, small, medium, paper (350
    M parameters) or large (1 B). Or a pretrained model: a Hugging Face directory, hf:NAME, or the
    directory of an earlier run."""

    lora_rank: int = 0
    """Rank of LoRA adapters, which are trained in place of the parameters of a pretrained model. >=
    0; 0 trains all parameters."""

    lora_modules: str | Sequence[str] = ALL_LINEAR
    """Modules of each block that get LoRA adapters, by PEFT's names, such as q_proj v_proj;
    all-linear: all of them."""

    lora_alpha: float | None = None
    """alpha of LoRA adapters, for their scale (see lora_scaling). > 0. Default: twice the rank;
    with rslora, 8."""

    lora_scaling: Literal["standard", "rslora"] = "standard"
    """Factor of the output of LoRA adapters. standard: alpha / rank. rslora: alpha / sqrt(rank)."""

    adapter: str | None = None
    """LoRA adapters to go on from, of this model: a directory in PEFT's format, or hf:NAME. Rank,
    alpha, scaling and modules are those of the adapters."""

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
        object.__setattr__(self, "source", expand_home("model", self.source))
        expect_least(self, lora_rank=0)
        dtype, trained = self.frozen_dtype, not self.has_adapters
        expected = "stored or float32 without lora_rank or adapter: trained parameters are float32"
        expect("frozen_dtype", dtype, not trained or dtype in ("stored", "float32"), expected)
        expect_positive(self, "lora_alpha")
        object.__setattr__(self, "lora_modules", _joined(self.lora_modules))
        if self.adapter is not None:
            object.__setattr__(self, "adapter", expand_home("adapter", self.adapter))
            for field in dataclasses.fields(self):
                if field.name.startswith("lora_"):
                    value = getattr(self, field.name)
                    unset = value == field.default
                    expect(field.name, value, unset, "nothing: the adapter has its own")

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained instead of the model."""
        return self.lora_rank > 0 or self.adapter is not None


def _joined(modules: str | Sequence[str]) -> str:
    """Names of modules with commas between them; "all", as of earlier versions, is ALL_LINEAR."""
    names = modules if isinstance(modules, str) else ",".join(modules)
    return ALL_LINEAR if names == "all" else names


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The processes that compute gradients."""

    kind: Annotated[Literal["ray", "local"], flag(name="engine")] = "ray"
    """ray: worker processes on the Ray cluster at RAY_ADDRESS, or on this machine. local: this
    process alone."""

    num_workers: int | None = None
    """Number of worker processes. >= 1. Default: one per accelerator, or one per threads_per_worker
    CPUs."""

    num_lanes: int = 8
    """Number of parts that a step is split into; each worker computes one at a time. >= 1. Without
    noise, changes the bits of the result."""

    threads_per_worker: int = 1
    """CPU threads of each worker. >= 1. Changes the bits of the result: 1 thread gives others than
    several."""

    strategy: Literal["auto", "scan", "direct", "ghost"] = "auto"
    """Method of computing clipped gradients. auto: ghost for ELS on CPUs if all parameters are
    trained and there are 10 million or more, else direct. Changes the bits of the result."""

    rows_per_pass: int | None = None
    """Rows of one forward and backward pass: more take more memory. >= 1. Changes the bits of the
    result. Default: 4 on CPUs; on accelerators those of one unit, of at most 4,096 tokens."""

    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Hardware of the workers. auto: the accelerators present in the cluster when the workers
    start; name one if nodes are still to join."""

    wait_for_workers: float = 0.0
    """Seconds to wait for nodes until num_workers fit, and later for workers that were lost, at
    least worker_timeout; an autoscaler is asked for them. >= 0."""

    worker_timeout: float = 600.0
    """Seconds that a Ray worker has for one part of a step, its compilation included, and to start.
    A worker that takes longer counts as hung: it is ended and started again, and its part is
    computed again. A part that takes too long 4 times ends the run. > 0."""

    def __post_init__(self):
        expect_least(self, num_lanes=1, threads_per_worker=1, num_workers=1, rows_per_pass=1)
        wait = self.wait_for_workers
        expect("wait_for_workers", wait, 0 <= wait < math.inf, ">= 0 seconds")
        limit = self.worker_timeout
        expect("worker_timeout", limit, 0 < limit < math.inf, "> 0 seconds")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings that cannot change the privacy guarantee."""

    data: DataConfig

    run_dir: Path
    """Directory for the results: configuration, ledger, metrics, TensorBoard logs, checkpoints,
    summary."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)

    recipe: Literal["default", "paper"] = "default"
    """Defaults for optimizer, learning_rate, schedule and ema. default: momentum with a learning
    rate computed from the noise, and parameter averaging. paper: adafactor at 0.1, constant,
    without averaging."""

    optimizer: str | None = None
    """momentum (SGD with momentum 0.9), or any optax optimizer by name, such as adafactor, adam or
    sgd, optionally with its options: adam:b1=0.8,eps=1e-6. Default: by recipe."""

    learning_rate: float | None = None
    """Learning rate, or its peak with warmup or a schedule. > 0. Default: by recipe."""

    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate over the steps: constant, or linear or cosine decay to zero at the last step.
    Default: by recipe."""

    ema: float | None = None
    """Decay factor per step of an exponential moving average of the parameters, which is evaluated
    and released at no privacy cost. In [0, 1); 0 uses the parameters of the last step. Default: by
    recipe."""

    warmup: float = 0.0
    """Fraction of the steps in which the learning rate rises linearly. In [0, 1)."""

    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices only: each step subtracts this times the learning
    rate times the matrix. >= 0."""

    seed: int | None = None
    """Seed for a reproducible run. Whoever knows or guesses it can remove the noise, so such a run
    has no guarantee, and the privacy budget counts it as infinite for its users (see
    budget_ledger). Default: a secret random key."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)

    eval_every: int | None = None
    """Steps between evaluations. >= 1. Default: a tenth of the run."""

    eval_examples: int = 512
    """Number of held-out examples per evaluation, the same each time. >= 1."""

    checkpoint_every: int = 10
    """Steps between checkpoints. >= 1. If this takes longer than a minute, there is one every
    minute, too."""

    log_every: int = 10
    """Steps between computations of epsilon, and between progress lines in a log with output
    verbose; otherwise a log has about ten such lines. >= 1."""

    output: Literal["quiet", "normal", "verbose"] = "normal"
    """Messages on stderr. quiet: warnings and errors. normal: plan, progress and results. verbose:
    technical details as well. --quiet and --verbose are short for it."""

    log_to: Sequence[LoggerName] = ("tensorboard",)
    """Loggers of the metrics, any of tensorboard, wandb, mlflow and trackio. tensorboard writes
    files into run_dir. The others can send what they get to another machine, so they get only the
    plan, epsilon and metrics that have noise. metrics.jsonl in run_dir has all metrics in any
    case."""

    log_non_private: bool = False
    """Give wandb, mlflow and trackio the metrics that are computed from private data without noise,
    too: losses, norms, times and sizes of draws. The guarantee does not cover them, which the plan
    says."""

    strict: bool = False
    """Refuse whatever would need a footnote to the guarantee, with the setting that needs none.
    Held-out users are then evaluated with eval_epsilon or not at all."""

    resume: bool = False
    """Resume the run in run_dir, or start it if there is none."""

    budget_ledger: Path | None = None
    """Directory of the budget ledger, which counts the privacy loss of all runs on the same users.
    Default: the environment variable FEDSIM_BUDGET_LEDGER, or ~/.local/state/fedsim/budget."""

    limit_epsilon: float | None = None
    """Refuse the run if all runs on these users, including this one, could cost a user more than
    this epsilon at this run's delta. > 0. Default: the limits set in the budget ledger."""

    spend_rest: bool = False
    """With a limit: instead of refusing the run, train as many steps, up to num_steps, as the limit
    allows."""

    def __post_init__(self):
        expect_least(self, eval_examples=1, checkpoint_every=1)
        expect_least(self, log_every=1, eval_every=1)
        object.__setattr__(self, "run_dir", Path(expand_home("run_dir", self.run_dir)))
        object.__setattr__(self, "log_to", tuple(dict.fromkeys(self.log_to)))
        if self.budget_ledger is not None:
            place = Path(expand_home("budget_ledger", self.budget_ledger))
            object.__setattr__(self, "budget_ledger", place)
        expect_positive(self, "learning_rate", "limit_epsilon")
        for name in ("warmup", "ema"):
            share = getattr(self, name)
            expect(name, share, share is None or 0 <= share < 1, "in [0, 1)")
        decay = self.weight_decay
        expect("weight_decay", decay, 0 <= decay < math.inf, ">= 0 and finite")
