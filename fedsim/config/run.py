"""What cannot change the guarantee: where data and results are, the model, the engine."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from fedsim.errors import expect
from fedsim.files import expand_home

FSDP, TENSOR = AXES = ("fsdp", "tensor")
EXPECTED = (
    "fsdp:N and tensor:N with a comma between, N >= 1; lanes and workers compute side by side"
)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices as a grid that has one model: arrays are cut along one axis in `fsdp` parts, and
    along another one in `tensor` parts."""

    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape that `fsdp:4` or `fsdp:4,tensor:2` names. Raises ConfigError: there is none."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.partition(":")
            known = axis in AXES and axis not in sizes
            expect("mesh", text, known and size.isdecimal() and int(size) > 0, EXPECTED)
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        cut = f",tensor:{self.tensor}" if self.tensor > 1 else ""
        return f"fsdp:{self.fsdp}{cut}"

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(dataclasses.astuple(self))


try:
    import tyro.conf

    flag: Any = tyro.conf.arg  # what the command line calls a setting
except ModuleNotFoundError:  # then there is no command line
    flag = dict

# May differ between a run and its resumption: they change neither the guarantee nor the bits. (That
# the data is the same is checked by its fingerprint, wherever it lies.)
OPERATIONAL = frozenset(
    {"data", "run_dir", "engine", "mesh", "num_workers", "num_lanes", "wait_for_workers"}
    | {"checkpoint_every", "log_every", "resume", "budget_ledger", "limit_epsilon", "spend_rest"}
)

UPDATE = ("optimizer", "learning_rate", "schedule", "ema")
"""The settings of a RunConfig that are None where they are left to the recipe."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text that is trained on, and whose it is."""

    source: Annotated[str, flag(name="data")]
    """A directory made by `fedsim data build`, Parquet/JSON/CSV files or a folder of them,
    hf:NAME, or pydocs."""

    user_column: str | None = None
    """Where data names files: column that says whose a row is. Default: user_id."""

    text_column: str | None = None
    """Where data names files: column with the text. Default: text."""

    normalise_ids: str | None = None
    """What makes ids that look alike one user, some of strip-marks, nfkc and casefold, with commas
    between them, where data are not built already. Default: each spelling is a user."""

    tokenizer: str | None = None
    """Where data names files: bytes, wordpiece:SIZE, or a tokenizer file. Default: bytes."""

    max_length: int | None = None
    """Where data names files: sequence length in tokens. >= 2. Default: 128."""

    def __post_init__(self):
        expect("data", self.source, self.source != "", "a directory, files, or pydocs")
        object.__setattr__(self, "source", expand_home("data", self.source))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", expand_home("tokenizer", self.tokenizer))
        _expect_least(self, max_length=2)

    @property
    def options(self) -> dict[str, Any]:
        """How files are read, where the user says so; what `corpora.load` takes beside a source."""
        names = ("user_column", "text_column", "normalise_ids", "tokenizer", "max_length")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    source: Annotated[str, flag(name="model")] = "tiny"
    """A fresh transformer, micro (to try a command), tiny, small, medium, paper (350 M parameters)
    or large (1 B), or a pretrained one: a Hugging Face directory, hf:NAME, a GGUF file, or the
    directory of a run of pretrain or train."""

    lora_rank: int = 0
    """Rank of LoRA adapters, which are trained instead of a pretrained model. >= 0; 0: the model
    itself is trained."""

    lora_layers: str = "all"
    """Which layers of each block get adapters: all, or some of query,key,value,out,gate,up,down."""

    lora_alpha: float | None = None
    """What adapters add is multiplied by alpha / rank. > 0. Default: twice the rank, so that
    adapters of any rank learn as fast."""

    remat: bool = False
    """Compute each block again in the backward pass: on accelerators less memory, more time. Part
    of the result's bits."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's computation. Parameters, norms, sums and noise are float32 always."""

    def __post_init__(self):
        object.__setattr__(self, "source", expand_home("model", self.source))
        _expect_least(self, lora_rank=0)
        alpha = self.lora_alpha
        expect("lora_alpha", alpha, alpha is None or 0 < alpha < math.inf, "> 0 and finite")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The processes that compute."""

    kind: Annotated[Literal["ray", "local"], flag(name="engine")] = "ray"
    """ray: processes on the cluster of RAY_ADDRESS or a private one. local: this process."""

    num_workers: int | None = None
    """Worker processes. Default: one per accelerator, or one per CPU (per threads_per_worker)."""

    num_lanes: int = 8
    """Slices of a step, which workers take one at a time. Part of the bits without noise."""

    threads_per_worker: int = 1
    """CPU threads of a worker. Part of the result's bits: 1 gives others than more."""

    devices_per_worker: int | None = None
    """JAX devices of a worker process: GPUs, TPU chips, or CPU devices. Part of the result's bits.
    Default: those of the mesh; or 1, or all chips of a TPU host."""

    mesh: str | None = None
    """How the devices of each worker, or of this process, share a model that one cannot hold:
    fsdp:4, in 4 parts, or fsdp:4,tensor:2, in 4 x 2. With strategy auto, scan or direct, a unit at
    a time. Part of the result's bits."""

    strategy: str = "auto"
    """How clipped sums are computed: scan, direct or ghost, each with :ROWS at a time if you like;
    or auto: the fastest of a few, timed at the start. Part of the result's bits."""

    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """What workers compute on. auto: the accelerators that the cluster has when workers first find
    room; where nodes are waited for, say which."""

    wait_for_workers: float = 0.0
    """Seconds to wait for nodes, which an autoscaler is asked for, until num_workers find room."""

    def __post_init__(self):
        _expect_least(self, num_lanes=1, threads_per_worker=1, num_workers=1, devices_per_worker=1)
        wait = self.wait_for_workers
        expect("wait_for_workers", wait, 0 <= wait < math.inf, ">= 0 seconds")
        shape, given = self.mesh_shape, self.devices_per_worker
        if shape is not None:
            cut = not self.strategy.startswith("ghost")
            expect("strategy", self.strategy, cut, "auto, scan or direct, with a mesh")
            number = given is None or given == shape.devices
            expect("devices_per_worker", given, number, f"{shape.devices}, those of mesh={shape}")
            object.__setattr__(self, "devices_per_worker", None)  # the mesh says it: no other run

    @property
    def mesh_shape(self) -> MeshShape | None:
        """The mesh that is asked for."""
        return None if self.mesh is None else MeshShape.parse(self.mesh)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What cannot change the guarantee."""

    data: DataConfig

    run_dir: Path
    """Directory of the run: configuration, ledger, metrics, TensorBoard, checkpoints, summary."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)

    recipe: Literal["default", "paper"] = "default"
    """What the four settings below are where they are left out. default: what learns most on public
    text, the rate by a rule in the noise. paper: adafactor, 0.1, constant, no average. Pre-training
    has the paper's."""

    optimizer: str | None = None
    """momentum, or any optax optimizer by name: adafactor, adam, sgd, ..., with options of its own
    if you like: adam:b1=0.8,eps=1e-6."""

    learning_rate: float | None = None
    """Learning rate: its peak, if it has a schedule. > 0."""

    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Whether the learning rate stays or falls to zero, in a line or like a cosine, by the last
    step. Pre-training has a schedule of its own."""

    ema: float | None = None
    """Evaluate and release an average of the steps' parameters, whose weights fall by this factor
    from one step to the one before: it costs no privacy. In [0, 1); 0: the last step's."""

    warmup: float = 0.0
    """Share of the steps in which the learning rate rises. In [0, 1)."""

    weight_decay: float = 0.0
    """What a step takes from each matrix: this times the learning rate times the matrix. >= 0."""

    local_steps: int = 1
    """ULS: steps of a user's own SGD over its examples of a step, a part of them each; what is
    clipped is the mean of the gradients met on the way (DP-FedAvg). In [1, group_size]."""

    local_learning_rate: float = 0.1
    """Learning rate of users' own SGD, where local_steps is above 1. > 0."""

    seed: int | None = None
    """Makes a run reproducible, and its noise known to whoever knows the seed: it promises nothing,
    and counts so for its users from then on (see budget_ledger). Default: none."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)

    eval_every: int | None = None
    """Steps between evaluations. Default: a tenth of the run."""

    eval_examples: int = 512
    """How many held-out examples an evaluation looks at; always the same ones."""

    checkpoint_every: int = 10
    """Steps between checkpoints; where these take longer, there is one a minute, too."""

    log_every: int = 10
    """Steps between progress lines where there is no terminal."""

    resume: bool = False
    """Go on with the run that run_dir holds, or start it if it holds none."""

    budget_ledger: Path | None = None
    """Directory of the ledger of the data, in which every run on these users is counted. Default:
    FEDSIM_BUDGET_LEDGER, or fedsim/budget in ~/.local/state."""

    limit_epsilon: float | None = None
    """Refuse the run if all runs on these users, this one included, could cost one of them more
    than this epsilon, at this run's delta. > 0. Default: the limits in the ledger of the data."""

    spend_rest: bool = False
    """With a limit: train as many steps, up to num_steps, as fit, instead of refusing the run."""

    def __post_init__(self):
        _expect_least(
            self, eval_examples=1, checkpoint_every=1, local_steps=1, log_every=1, eval_every=1
        )
        object.__setattr__(self, "run_dir", Path(expand_home("run_dir", self.run_dir)))
        if self.budget_ledger is not None:
            place = Path(expand_home("budget_ledger", self.budget_ledger))
            object.__setattr__(self, "budget_ledger", place)
        for name in ("learning_rate", "local_learning_rate"):
            rate = getattr(self, name)
            expect(name, rate, rate is None or 0 < rate < math.inf, "> 0 and finite")
        limit = self.limit_epsilon
        holds = limit is None or 0 < limit < math.inf
        expect("limit_epsilon", limit, holds, "> 0 and finite")
        for name in ("warmup", "ema"):
            share = getattr(self, name)
            expect(name, share, share is None or 0 <= share < 1, "in [0, 1)")
        decay = self.weight_decay
        expect("weight_decay", decay, 0 <= decay < math.inf, ">= 0 and finite")


def _expect_least(config: Any, **least: int) -> None:
    """Raises ConfigError unless each setting that is named is at least that, or None."""
    for name, number in least.items():
        value = getattr(config, name)
        expect(name, value, value is None or value >= number, f">= {number}")
