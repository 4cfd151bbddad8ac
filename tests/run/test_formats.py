"""What a run's files hold: the published schemas say it, and what is something else is refused."""

import dataclasses

import jsonschema
import pytest
from test_console import PLAN
from test_ledger import EVENT, OTHER, write
from test_plan import WAYS

from docs.schemas import schemas
from fedsim.accounting import allocated_event
from fedsim.config import PrivacyConfig, RunConfig, as_dict, flags_of, run_config
from fedsim.plan import SamplingPlan, ledger_head
from fedsim.run import ledger
from fedsim.run.ledger import ChainedLog, LedgerError


@pytest.fixture(scope="module")
def validators():
    return {name: jsonschema.Draft202012Validator(each) for name, each in schemas().items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_plan_is_of_its_schema(way, validators):
    validators["plan"].validate(dataclasses.replace(PLAN, **way).as_dict())


def test_every_line_of_a_ledger_is_of_its_schema(tmp_path, validators):
    cyclic = dataclasses.replace(PLAN, sampling=SamplingPlan("cyclic", prob=0.1, bands=2))
    head = ledger_head(
        dataclasses.replace(cyclic, group_size_epsilon=0.5), config_sha256="0" * 64, key_seal="a"
    )
    write(tmp_path, [EVENT, OTHER, allocated_event(2.0, 4), None], head)
    for line in ledger.read(tmp_path):
        validators["ledger"].validate(line)
        assert not validators["ledger"].is_valid({**line, "chain": "x"})
    assert not validators["ledger"].is_valid({**line, "event": {"noise_multiplier": 2.0}})
    first = ledger.read(tmp_path)[0]
    first["head"]["plan"]["sampling"]["bands"] = "two"
    assert not validators["ledger"].is_valid(first)


@pytest.mark.parametrize(
    "fault, says",
    [
        ({"step": "0", "event": None}, "step: Input should be a valid integer"),
        ({"step": 0, "event": None, "note": "my text"}, "note: Unexpected keyword argument"),
        ({"step": 0, "event": None, "epsilon": {"a": "my text"}}, "epsilon: Input should be"),
    ],
    ids=str,
)
def test_a_line_of_something_else_is_refused_by_field_without_its_text(fault, says, tmp_path):
    log = ChainedLog(tmp_path / ledger.FILE, lambda *_: None)
    for record in ({"head": {"plan": {}, "adjacency": ""}}, fault):
        log.append(record)
    log.close()
    with pytest.raises(LedgerError, match=f"line 2 is none of a ledger: {says}") as refusal:
        ledger.read(tmp_path)
    assert "my text" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_schema_of_settings_takes_what_they_are_and_nothing_else():
    schema = schemas()["settings"]
    names = flags_of(PrivacyConfig).keys() | flags_of(RunConfig).keys()
    assert schema["properties"].keys() == names
    assert all(about["description"] for about in schema["properties"].values())
    run = run_config(data="posts", run_dir="run", lora_rank=4)
    settings = as_dict(PrivacyConfig(4.0, 10)) | as_dict(run)
    jsonschema.validate(settings, schema)
    jsonschema.validate({**settings, "epsilon": "inf"}, schema)
    for fault in ({"lora_rnk": 8}, {"lora_rank": "8"}, {"engine": "spmd"}, {"epsilon": "4"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**settings, **fault}, schema)
