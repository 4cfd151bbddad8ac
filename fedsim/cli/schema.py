"""JSON Schema of the settings of `fedsim train`: `python -m fedsim.cli.schema > settings.json`.

It describes the file of --config, settings of `fedsim select`, and those in a run's config.json.
"""

import dataclasses
import json
from typing import Any, Literal, get_args

from fedsim.cli.help import flags
from fedsim.config import PrivacyConfig, RunConfig, flags_of, types_of


def json_schema() -> dict[str, Any]:
    """JSON Schema with type, default and help text of each setting; all are optional in a file."""
    import pydantic  # loaded here alone: commands do not need it

    settings: dict[str, Any] = {}
    for kind in (PrivacyConfig, RunConfig):
        helps = {flag.names[0]: flag.text for flag in flags(kind)}
        types = types_of(kind)
        for name, (_, field) in flags_of(kind).items():
            default = None if field.default is dataclasses.MISSING else field.default
            about = pydantic.Field(default, description=helps[f"--{name.replace('_', '-')}"])
            number = float in (types[name], *get_args(types[name]))
            settings[name] = types[name] | Literal["inf"] if number else types[name], about
    strict = pydantic.ConfigDict(extra="forbid")
    model = pydantic.create_model("fedsim train", __config__=strict, **settings)
    return model.model_json_schema()


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
