"""Settings from Python and from files: their types, and their JSON Schema."""

import math
from pathlib import Path
from typing import Literal

import jsonschema
import numpy as np
import pytest

from fedsim.cli.schema import json_schema
from fedsim.config import PrivacyConfig, RunConfig, as_dict, run_config, typed, types_of

SCHEME = Literal["linear", "cosine"] | None


@pytest.mark.parametrize(
    "value, kind, expected",
    [
        (1, float, 1.0),
        (np.float32(0.5), float, 0.5),
        ("inf", float | None, math.inf),
        (np.int64(3), int | None, 3),
        (np.True_, bool, True),
        (np.str_("adam"), str, "adam"),
        ("inf", str, "inf"),
        ("linear", SCHEME, "linear"),
        (None, SCHEME, None),
        ("ledger", Path | None, Path("ledger")),
    ],
)
def test_a_value_becomes_one_of_the_type(value, kind, expected):
    found = typed("name", value, kind)
    assert found == expected and type(found) is type(expected)


def test_the_schema_takes_what_the_settings_are_and_nothing_else():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    names = types_of(PrivacyConfig) | types_of(RunConfig)
    assert schema["properties"].keys() == names.keys()
    assert "user-level differential privacy" in schema["properties"]["epsilon"]["description"]
    settings = as_dict(PrivacyConfig(4.0, 10)) | as_dict(run_config(data="pydocs", run_dir="run"))
    jsonschema.validate(settings, schema)
    jsonschema.validate({**settings, "epsilon": "inf"}, schema)
    for fault in ({"lora_rnk": 8}, {"lora_rank": "8"}, {"engine": "spmd"}, {"epsilon": "4"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**settings, **fault}, schema)
