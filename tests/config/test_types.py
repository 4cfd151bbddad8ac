"""Settings from Python and from files: their types, and their JSON Schema."""

import math
from pathlib import Path

import pytest

from fedsim.config import PrivacyConfig, as_dict, run_config, settings_of

FLAGS = {"data": "pydocs", "run_dir": "run"}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("ema", 0, 0.0),
        ("optimizer", "inf", "inf"),
        ("schedule", "linear", "linear"),
        ("schedule", None, None),
        ("budget_ledger", "ledger", Path("ledger")),
        ("lora_modules", ["query", "value"], "query,value"),
    ],
)
def test_a_value_becomes_one_of_the_type(name, value, expected):
    found = settings_of(run_config(**FLAGS, **{name: value}))[name]
    assert found == expected and isinstance(found, type(expected))


def test_an_infinite_epsilon_is_read_as_json_has_it():
    assert PrivacyConfig("inf", 10).epsilon == math.inf
    assert as_dict(PrivacyConfig(math.inf, 10))["epsilon"] == "inf"
