"""What a run is told: `PrivacyConfig` can change the guarantee, `RunConfig` cannot.

The split is the contract (ARCHITECTURE: public constants). Everything in `PrivacyConfig` is hashed
into the ledger and fixed for the life of a run; `RunConfig` says where data and results are, which
model is trained how, and on what. Field docstrings are the help texts of the command line.
"""

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal


class FedsimError(Exception):
    """What the command line shows as one line; its exit code."""

    exit_code = 1
    details = ""
    """Shown before that line where the fault is in code: a traceback."""


class ConfigError(FedsimError, ValueError):
    """A user's mistake: one line that names the field, the value and what was expected."""

    exit_code = 2


class Algorithm(enum.StrEnum):
    """The two algorithms of the paper."""

    ELS = "els"
    ULS = "uls"


@dataclasses.dataclass(frozen=True)
class PrivacyConfig:
    """What can change the guarantee."""

    epsilon: float
    """Target user-level epsilon. > 0; 'inf' trains without noise: non-private, a sanity bound."""

    num_steps: int
    """T: number of steps. >= 1."""

    budget: int = 128
    """Expected gradients per step: B for ELS, group size times cohort size for ULS. >= 1."""

    delta: float | None = None
    """In (0, 1). Default: n^-1.1 for n training examples, derived from the data's size."""

    group_size: int | None = None
    """G: most examples of a user, in all (ELS; default: the median user's) or a step (ULS; 1)."""

    clip_norm: float = 1.0
    """C: clip norm of an example's (ELS) or a user's (ULS) gradient. In [1e-6, 1e6]."""

    clipping: Literal["normalised", "plain"] = "normalised"
    """normalised: g min(1/C, 1/|g|), sensitivity 1 (De et al. 2022). plain: g min(1, C/|g|)."""

    sampling: Literal["poisson", "shuffle"] = "poisson"
    """shuffle is the paper's comparison mode: epsilon as if Poisson sampled, not a guarantee."""

    group_size_epsilon: float | None = None
    """ELS: choose the group size privately, as the median of users' numbers of examples, with this
    much of epsilon. > 0 and below epsilon. Default: group_size, or the median as it is."""

    clip_quantile: float | None = None
    """Move the clip norm, from clip_norm on, to this quantile of the norms of users' (ULS) or
    examples' (ELS) gradients, privately and within epsilon (Andrew et al. 2021). In (0, 1)."""

    assumed_population: int | None = None
    """Account as if the users had been drawn from so many, at least as many as there are, as the
    paper does for CC-News: an assumption, not a guarantee, and labelled so wherever epsilon is
    shown. Also of delta's default. Default: the users there are."""

    chosen_on_data: str = ""
    """Settings chosen by looking at this data without protection (group_size,clip_norm): nothing
    accounts for that, so the report says it. `fedsim recommend` fills this in."""

    def __post_init__(self):
        expect("epsilon", self.epsilon, self.epsilon > 0, "> 0, or inf for no noise")
        expect("num_steps", self.num_steps, self.num_steps >= 1, ">= 1")
        expect("budget", self.budget, self.budget >= 1, ">= 1")
        # Far outside, float32 norms underflow or overflow, and clipping bounds nothing.
        expect("clip_norm", self.clip_norm, 1e-6 <= self.clip_norm <= 1e6, "in [1e-6, 1e6]")
        if self.delta is not None:
            expect("delta", self.delta, 0 < self.delta < 1, "in (0, 1)")
        if self.group_size is not None:
            expect("group_size", self.group_size, self.group_size >= 1, ">= 1")
        if (share := self.group_size_epsilon) is not None:
            holds = 0 < share < self.epsilon
            expect("group_size_epsilon", share, holds, f"> 0 and below epsilon={self.epsilon}")
        if self.clip_quantile is not None:
            expect("clip_quantile", self.clip_quantile, 0 < self.clip_quantile < 1, "in (0, 1)")
        if (assumed := self.assumed_population) is not None:
            expect("assumed_population", assumed, assumed >= 1, ">= 1")
        names = {field.name for part in (PrivacyConfig, RunConfig) for field in fields(part)}
        for name in filter(None, self.chosen_on_data.split(",")):
            expect("chosen_on_data", name, name in names, "names of settings with commas between")


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """What is planted in a training that is audited, and how sure its bound is to be."""

    gradient_canaries: int = 400
    """Made-up users whose gradient always points their own way. >= 0; each is included with
    probability 1/2. At delta 1e-6, 400 can refute epsilons below 4.38, and 17,000 below 8."""

    text_canaries: int = 100
    """Made-up users who wrote a line of random tokens. >= 0; each is included with probability
    1/2."""

    confidence: float = 0.95
    """Of each lower bound. In [0.5, 1)."""

    attacked_users: int = 200
    """How many real users, in training and held out, are told apart by their loss. >= 0."""

    def __post_init__(self):
        for name in ("gradient_canaries", "text_canaries", "attacked_users"):
            expect(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        total = self.gradient_canaries + self.text_canaries
        expect("gradient_canaries", self.gradient_canaries, total > 0, "a canary of either kind")
        expect("confidence", self.confidence, 0.5 <= self.confidence < 1, "in [0.5, 1)")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """What a pre-training is told beside its `RunConfig`. No privacy, so no constants of it."""

    num_steps: int
    """Number of steps. >= 1. The paper's: 400,000."""

    batch_size: int = 512
    """Examples of a step; each is seen once in every pass over the data. >= 1."""

    rows_per_pass: int = 16
    """Examples of one forward and backward pass. >= 1; divides the batch size."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises. In [0, num_steps)."""

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "rows_per_pass"):
            expect(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        rows = self.rows_per_pass
        expect("rows_per_pass", rows, self.batch_size % rows == 0, f"to divide {self.batch_size}")
        warmup = self.warmup_steps
        expect("warmup_steps", warmup, 0 <= warmup < self.num_steps, f"in [0, {self.num_steps})")


@dataclasses.dataclass(frozen=True)
class Personalization:
    """How models are personalized. The defaults are the paper's, where it says."""

    num_epochs: int = 4
    """How often SGD goes over a user's first half. >= 1."""

    batch_size: int = 8
    """Examples of a step of SGD. >= 1."""

    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Of SGD, each tried; the best counts. > 0."""

    users: int = 256
    """How many users are looked at, drawn at random. >= 1."""

    max_examples: int = 64
    """Most examples of a user's half. >= 1."""

    seed: int = 0
    """Of users, halves and the order of examples: the same ones for every model."""

    def __post_init__(self):
        for name in ("num_epochs", "batch_size", "users", "max_examples"):
            expect(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        rates = self.learning_rates
        expect("learning_rates", rates, bool(rates) and min(rates) > 0, "numbers > 0")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What cannot change the guarantee."""

    data: str
    """A directory made by `fedsim data build`, parquet/JSONL/CSV files, hf:NAME, or pydocs."""

    run_dir: Path
    """Directory of the run: configuration, ledger, metrics, TensorBoard, checkpoints, summary."""

    model: str = "tiny"
    """A fresh transformer, tiny, small, medium or paper (350 M parameters), or a pretrained one: a
    Hugging Face directory, hf:NAME, a GGUF file, or the directory of a run of pretrain or train."""

    lora_rank: int = 0
    """Rank of LoRA adapters, which are trained instead of a pretrained model. >= 0; 0: the model
    itself is trained."""

    lora_layers: str = "all"
    """Which layers of each block get adapters: all, or some of query,key,value,out,gate,up,down."""

    lora_alpha: float = 16.0
    """What adapters add is multiplied by alpha / rank. > 0."""

    remat: bool = False
    """Compute each block again in the backward pass: on accelerators less memory, more time. Part
    of the result's bits."""

    optimizer: str = "adafactor"
    """momentum, or any optax optimizer by name: adafactor, adam, sgd, ..."""

    learning_rate: float = 0.1
    """Constant learning rate. > 0. In pre-training, its peak."""

    local_steps: int = 1
    """ULS: steps of a user's own SGD over its examples of a step, a part of them each; what is
    clipped is the mean of the gradients met on the way (DP-FedAvg). In [1, group_size]."""

    local_learning_rate: float = 0.1
    """Of users' own SGD, where local_steps is above 1. > 0."""

    user_column: str | None = None
    """Where data names files: column that says whose a row is. Default: user_id."""

    text_column: str | None = None
    """Where data names files: column with the text. Default: text."""

    tokenizer: str | None = None
    """Where data names files: bytes, wordpiece:SIZE, or a tokenizer file. Default: bytes."""

    max_length: int | None = None
    """Where data names files: sequence length in tokens. >= 2. Default: 128."""

    seed: int | None = None
    """Makes a run reproducible, and its noise known to whoever knows the seed. Default: none."""

    engine: Literal["ray", "local", "spmd"] = "ray"
    """ray: processes on the cluster of RAY_ADDRESS or a private one. local: this process. spmd:
    like ray, the processes joined by jax.distributed, for large models on many nodes."""

    num_workers: int | None = None
    """Worker processes. Default: one per accelerator, or one per CPU (per threads_per_worker)."""

    num_lanes: int = 8
    """Slices of a step, which workers take one at a time. Part of the result's bits."""

    threads_per_worker: int = 1
    """CPU threads of a worker. Part of the result's bits: 1 gives others than more."""

    devices_per_worker: int | None = None
    """JAX devices of a worker process: GPUs, TPU chips, or CPU devices. Part of the result's bits.
    Default: 1, or all chips of a TPU host."""

    strategy: str = "auto"
    """How clipped sums are computed: scan, direct, bookkeeping or vmap, each with :ROWS at a
    time if you like, or auto: the fastest of a few, timed at the start. Part of the result's
    bits."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's computation. Parameters, norms, sums and noise are float32 always."""

    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """What workers compute on. auto: the accelerators that the cluster has when the run starts."""

    wait_for_workers: float = 0.0
    """Seconds to wait for nodes, which an autoscaler is asked for, until num_workers find room."""

    eval_every: int | None = None
    """Steps between evaluations. Default: a tenth of the run."""

    eval_examples: int = 512
    """How many held-out examples an evaluation looks at; always the same ones."""

    checkpoint_every: int = 10
    """Steps between checkpoints."""

    log_every: int = 10
    """Steps between progress lines where there is no terminal."""

    resume: bool = False
    """Go on with the run that run_dir holds, or start it if it holds none."""

    def __post_init__(self):
        expect("data", self.data, self.data != "", "a directory, files, or pydocs")
        positive = ("num_lanes", "threads_per_worker", "eval_examples", "checkpoint_every")
        positive += ("local_steps",)
        for name in (*positive, "log_every"):
            expect(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        for name, least in (
            *(("num_workers", 1), ("devices_per_worker", 1)),
            *(("eval_every", 1), ("max_length", 2), ("lora_rank", 0)),
        ):
            value = getattr(self, name)
            expect(name, value, value is None or value >= least, f">= {least}")
        wait = self.wait_for_workers
        expect("wait_for_workers", wait, 0 <= wait < math.inf, ">= 0 seconds")
        alpha, rate = self.lora_alpha, self.learning_rate
        expect("lora_alpha", alpha, 0 < alpha < math.inf, "> 0 and finite")
        expect("learning_rate", rate, 0 < rate < math.inf, "> 0 and finite")
        rate = self.local_learning_rate
        expect("local_learning_rate", rate, 0 < rate < math.inf, "> 0 and finite")

    @property
    def data_options(self) -> dict[str, Any]:
        """How files are read, where the user says so; what `corpora.load` takes beside a source."""
        names = ("user_column", "text_column", "tokenizer", "max_length")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


# May differ between a run and its resumption: they change neither the guarantee nor the bits. (That
# the data is the same is checked by its fingerprint, wherever it lies.)
OPERATIONAL = frozenset(
    {"data", "run_dir", "engine", "num_workers", "wait_for_workers"}
    | {"checkpoint_every", "log_every", "resume"}
)


def expect(field: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ConfigError in one line that names field, value and expectation unless `holds`."""
    if not holds:
        raise ConfigError(f"{field}={value}: expected {expected}")


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Around code that does not know ConfigError: its ValueErrors are the user's mistakes."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def as_dict(config: PrivacyConfig | RunConfig | PretrainConfig) -> dict[str, Any]:
    """The config in JSON's types; inf is written as the string 'inf'."""
    return {name: to_json(value) for name, value in dataclasses.asdict(config).items()}


def changed(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a config's settings, in JSON's types, that are not at their defaults."""
    defaults = {field.name: field.default for field in fields(kind)}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def to_json(value: Any) -> Any:
    """Paths and non-finite floats as strings, everything else as it is."""
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
