"""JSON Schemas of a run's files: `python docs/schemas.py DIR` writes one file for each.

plan.json is of a plan (in `config.json` and the ledger's first line), ledger.json of each line of
`ledger.jsonl`, summary.json of `summary.json`, published.json of `published.json`; settings.json is
of the settings of `fedsim train`: of files of --config, and those in a run's `config.json`.
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, create_model

from fedsim.config import PrivacyConfig, RunConfig, flags_of
from fedsim.config.load import to_json
from fedsim.files import make_directory, write_json
from fedsim.plan import Plan
from fedsim.run.formats import FirstLine, Published, SegmentLine, StepLine, Summary


def schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas by name: of plan, ledger (of each line), summary and published folders."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    plan, summary = described(Plan), described(Summary)
    parts = plan.pop("$defs") | summary.pop("$defs")
    # The summary has the plan's fields beside its own, and its adjacency in words.
    required = [name for name in plan["required"] if name != "adjacency"]
    properties = {name: of for name, of in plan["properties"].items() if name != "adjacency"}
    of_plan = {**plan, "properties": properties, "required": required}
    del of_plan["additionalProperties"]
    both = {"allOf": [of_plan, summary], "unevaluatedProperties": False, "$defs": parts}
    ledger, whole = described(FirstLine | SegmentLine | StepLine), described(Plan)
    ledger["$defs"] |= {**whole.pop("$defs"), "Plan": whole}
    ledger["$defs"]["Head"]["properties"]["plan"] = {"$ref": "#/$defs/Plan"}
    return {
        "plan": {**dialect, **described(Plan)},
        "ledger": {**dialect, **ledger, "title": "A line of ledger.jsonl"},
        "summary": {**dialect, "title": "summary.json", **both},
        "published": {**dialect, **described(Published), "title": "published.json"},
        "settings": {**dialect, **settings()},
    }


def settings() -> dict[str, Any]:
    """The schema of the settings of `fedsim train`: type, default and help text of each."""
    found: dict[str, Any] = {}
    for name, one in (flags_of(PrivacyConfig) | flags_of(RunConfig)).items():
        number = float in (one.type, *get_args(one.type))
        kind = one.type | Literal["inf"] if number else one.type
        default = None if one.default is ... else to_json(one.default)
        found[name] = kind, Field(default, description=one.text)
    strict = ConfigDict(extra="forbid")
    return create_model("fedsim train", __config__=strict, **found).model_json_schema()


def described(kind: Any) -> dict[str, Any]:
    """The schema of a type as it is written."""
    return TypeAdapter[Any](kind).json_schema(mode="serialization")


def main(place: str) -> None:
    """Write each schema to a file in the directory `place`."""
    make_directory(Path(place))
    for name, schema in schemas().items():
        write_json(Path(place) / f"{name}.json", schema)


if __name__ == "__main__":
    main(*sys.argv[1:])
