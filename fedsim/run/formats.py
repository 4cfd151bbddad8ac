"""What a run's files hold: checked by pydantic where they are read, published as JSON Schema.

`python -m fedsim.run.formats DIR` writes plan.json, ledger.json and summary.json there: the schemas
of a plan (in `config.json` and the ledger's first line), of each line of `ledger.jsonl`, and of
`summary.json`, as this version writes them. docs/api/schemas.md says how to verify with them.
"""

import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema

from fedsim.accounting import PureEvent, StepEvent
from fedsim.config import SamplingName
from fedsim.errors import first_fault
from fedsim.files import make_directory, write_json
from fedsim.plan import FLAT, LEFT_OUT_AT, Number, plans

CHECKED: Any = {"strict": True, "extra": "forbid", "use_attribute_docstrings": True}
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Loss = Annotated[
    float,
    Field(strict=False),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["nan", "inf"]}]}),
]


@dataclass(frozen=True)
class GroupSizeChoice(PureEvent):
    """What choosing the group size privately released, before the first step."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    what: Literal["group_size"] = "group_size"


@dataclass(frozen=True)
class Distance:
    """What is to be added for noise that is not ideal."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Head:
    """What is fixed for the life of a run."""

    plan: dict[str, Any]
    """See `Plan.from_dict`."""
    adjacency: str
    """In words."""
    slack: Distance | None = None
    key_seal: str = ""
    """Keyed digest: says to the key's owner whether a key is the run's."""
    config_sha256: str = ""
    """Of config.json."""
    before: list[GroupSizeChoice] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class FirstLine:
    """The first line of a ledger."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    head: Head
    chain: Digest
    """sha256 of this line's bytes up to this field."""


@dataclass(frozen=True)
class StepLine:
    """A step's line of a ledger; earlier versions left some of it out."""

    __pydantic_config__: ClassVar[Any] = CHECKED
    step: int
    """From 0."""
    event: StepEvent | None
    """What the step is to the accountant; null: it has no noise."""
    chain: Digest
    """sha256 of the link before in hex, followed by this line's bytes up to this field."""
    sampling_run: SamplingName | None = None
    sampling_accounted: SamplingName | None = None
    epsilon: Number | None = None
    """Of all steps so far, as it was shown; null: it was not."""
    gradient_sha256: str | None = None
    """Of what the step released."""
    noise_row: str | None = None
    """Keyed digest of the step's row of correlated noise."""


@dataclass(frozen=True)
class Summary:
    """What a run ended with and claims, beside the fields of its plan."""

    __pydantic_config__: ClassVar[Any] = {**CHECKED, "extra": "ignore"}
    epsilon: Number
    """That the ledger's events cost, with all steps that were planned, before `slack`."""
    epsilon_holds: str
    """What epsilon holds under: `adjacency`, or why it is no guarantee."""
    adjacency: str
    """In words."""
    delta: float
    num_steps: int
    steps_done: int
    final_eval_loss: Loss | None = None
    """On held-out users, in nats per token; nan: not evaluated after the last step."""
    initial_eval_loss: Loss | None = None
    slack: Distance | None = None
    privacy_unit: Literal["user"] = "user"
    gradient_noise_multiplier: float | None = None
    """What the gradient got, beside what a step releases with it."""
    ledger_chain: str = ""
    """The last link of the ledger."""
    resumed_elsewhere: int = 0
    """How often a process resumed the run where bits may be others."""
    final_clip_norm: float | None = None
    lost_steps: int = 0
    """Steps that were paid for, and whose gradient was lost to a crash."""
    params_sha256: str = ""
    gradients_computed: int | None = None
    wall_seconds: float | None = None
    host: str = ""


def check(kind: type, record: Any) -> None:
    """Raises ValueError: a record of JSON is none of `kind`; the line names the field."""
    try:
        _adapter(kind).validate_json(json.dumps(record))
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schemas of plan, ledger (of each line) and summary, by name."""
    plan, parts = _flat_schema()
    ledger = _adapter(FirstLine | StepLine).json_schema()
    summary = _adapter(Summary).json_schema()
    own = {**plan, "properties": {n: v for n, v in plan["properties"].items() if n != "adjacency"}}
    own["required"] = [name for name in plan["required"] if name != "adjacency"]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    closed = {"unevaluatedProperties": False}
    defs = {**parts, **ledger.pop("$defs"), "Plan": {**plan, **closed}}
    defs["Head"]["properties"]["plan"] = {"$ref": "#/$defs/Plan"}
    return {
        "plan": {**dialect, **plan, **closed, "$defs": parts},
        "ledger": {**dialect, **ledger, "title": "A line of ledger.jsonl", "$defs": defs},
        "summary": {
            **dialect,
            "title": "summary.json",
            "allOf": [own, {n: v for n, v in summary.items() if n != "$defs"}],
            **closed,
            "$defs": {**parts, **summary["$defs"]},
        },
    }


def _flat_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a plan in JSON, where fields of options stand beside the plan's, and of its
    parts."""
    schema = plans().json_schema(by_alias=True)
    parts = schema.pop("$defs")
    groups = [schema["properties"].pop(name) for name in FLAT]
    for each in (schema, *parts.values()):
        if "properties" in each:
            each["required"] = [n for n, of in each["properties"].items() if _always(n, of)]
    ways = [{key: way[key] for key in ("oneOf", "anyOf") if key in way} for way in groups]
    return {**schema, "allOf": ways}, parts


def _always(name: str, of: dict[str, Any]) -> bool:
    """Whether a field is written whatever its value is."""
    return name not in LEFT_OUT_AT or ("const" in of and of["const"] != LEFT_OUT_AT[name])


def main(place: str) -> None:
    """Write the schemas, a file each."""
    make_directory(Path(place))
    for name, schema in schemas().items():
        write_json(Path(place) / f"{name}.json", schema)


if __name__ == "__main__":
    main(*sys.argv[1:])
