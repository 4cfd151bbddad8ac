"""Settings from Python and from files: their types, and their JSON Schema."""

import math
from pathlib import Path
from typing import Literal

import jsonschema
import numpy as np
import pytest
from refused import refuses

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


@pytest.mark.parametrize(
    "value, kind, expected",
    [
        (True, float, "a number"),
        ("3", float, "a number"),
        (np.ones(2), float | None, "a number"),
        (True, int, "a whole number"),
        ("3", int | None, "a whole number"),
        (3.0, int, "a whole number"),
        (1, bool, "true or false"),
        (3, str | None, "a text"),
        ("up", SCHEME, "one of linear, cosine"),
        (3, Path, "a path"),
        (None, int, "a value"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_in_words(value, kind, expected):
    with refuses("name") as refused:
        typed("name", value, kind)
    assert refused.value.expected == expected
    assert str(refused.value) == f"name={value}: expected {expected}"


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
