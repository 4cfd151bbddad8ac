"""Formats of ledger, summary and `published.json`: `ledger.expect_format` checks files by them.

docs/schemas.py writes them as JSON Schemas; docs/api/schemas.md describes how to verify with them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from fedsim.accounting import StepEvent
from fedsim.config import SamplingName
from fedsim.plan import Number

CHECKED: Any = {"strict": True, "extra": "forbid", "use_attribute_docstrings": True}
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Nonce = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Index = Annotated[int, Field(ge=0)]
Loss = Annotated[
    float,
    Field(strict=False),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["nan", "inf"]}]}),
]


@dataclass(frozen=True)
class Distance:
    """Slack: what is added to epsilon and delta for noise that is not ideal."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Head:
    """Values that are fixed for the life of a run."""

    plan: dict[str, Any]
    """The plan: not checked here, for budgets also read what runs of earlier versions released."""
    adjacency: str
    """The adjacency in words."""
    key_seal: str = ""
    """Keyed digest, by which the owner of a key recognises its runs."""
    config_sha256: str = ""
    """sha256 of config.json."""


@dataclass(frozen=True)
class FirstLine:
    """The first line of a ledger."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    head: Head
    chain: Digest
    """sha256 of this line's bytes up to this field."""


@dataclass(frozen=True)
class Segment:
    """A part of a run between its start, or a resume, and its end, or a crash."""

    nonce: Nonce
    """Random; what the segment's steps draw, noise too, is a function of the key and of it."""
    after: Index
    """Number of steps of the checkpoint that it went on from; 0 without one."""
    first: Index
    """Index of its first step: the number of steps of all segments before. Those from `after` on
    were lost: they are paid for, and not applied."""
    computed_on: str = ""
    """Kind of host and device, and a digest of the versions of packages, on which bits depend."""


@dataclass(frozen=True)
class SegmentLine:
    """The line of a segment in a ledger, before its first step."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    segment: Segment
    chain: Digest
    """As of a step."""


@dataclass(frozen=True)
class StepLine:
    """The line of a step in a ledger; earlier versions left out some fields."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    step: int
    """Index of the step, from 0; it is used once."""
    event: StepEvent | None
    """The accountant's event of the step; null without noise."""
    chain: Digest
    """sha256 of the previous line's chain in hex, followed by this line's bytes up to this
    field."""
    sampling_run: SamplingName | None = None
    sampling_accounted: SamplingName | None = None
    epsilon: Number | None = None
    """Epsilon of all steps so far, if it was shown; else null."""
    gradient_sha256: str | None = None
    """Digest of the numbers that the step released."""


@dataclass(frozen=True)
class Summary:
    """Results and claim of a run, beside the fields of its plan."""

    __pydantic_config__: ClassVar[Any] = {**CHECKED, "extra": "ignore"}
    epsilon: Number
    """Epsilon of the ledger's events, with all planned steps, without `slack`."""
    epsilon_holds: str
    """The value of `adjacency`, or the values of the facts that make epsilon no guarantee."""
    adjacency: str
    """The adjacency in words."""
    delta: float
    num_steps: int
    steps_done: int
    final_eval_loss: Loss | None = None
    """Loss on held-out users, in `loss_unit`; nan if not evaluated after the last step."""
    initial_eval_loss: Loss | None = None
    outside: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """What the guarantee does not cover; empty if there is nothing."""
    private_fields: list[str] = dataclasses.field(default_factory=list)
    """Fields of this file that have no noise and are not to be published."""
    num_examples: int | None = None
    loss_unit: str = "nats per token"
    """nats per token or nats per byte; empty for a task of the user's own."""
    slack: Distance | None = None
    privacy_unit: Literal["user"] = "user"
    sampling_prob: float = 0.0
    sampling_run: SamplingName = "poisson"
    """How units were drawn."""
    sampling_accounted: SamplingName = "poisson"
    gradient_noise_multiplier: float | None = None
    """Noise multiplier of the gradient alone, if a step releases more than its gradient."""
    ledger_chain: str = ""
    """Chain of the last line of the ledger."""
    final_clip_norm: float | None = None
    lost_steps: int = 0
    """Number of steps that count for epsilon, but whose gradient was lost to a crash."""
    params_sha256: str = ""
    gradients_computed: int | None = None
    wall_seconds: float | None = None


@dataclass(frozen=True)
class Published:
    """The claim of a folder that `fedsim publish` made, and the digests of its other files."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    claim: str
    """The claim in two sentences, with the digest of the model."""
    epsilon: float
    """Epsilon of all planned steps, with the slack of noise that is not ideal."""
    num_steps: int
    """Number of released steps: fewer than planned if a callback ended the run early."""
    delta: float
    adjacency: str
    """The adjacency in words."""
    params_sha256: Digest
    """sha256 of the parameters of the run's last checkpoint."""
    files: dict[str, Digest]
    """sha256 of each other file, by its path in the folder."""
    scale: float | None = None
    """Factor of the products of adapters that were merged into the model; None: it has none."""
    frozen_dtype: str = "stored"
    """Type of the matrices beneath adapters, as in the settings."""
