"""On how many devices a model is said to fit, with which strategy, and how it is asked."""

import json

import pytest
from pretrained_models import make_model, make_texts

from fedsim.cli.main import main
from fedsim.errors import ConfigError
from fedsim.tuning import fitting
from fedsim.tuning.fitting import bytes_of

SMALL = {"width": 64, "num_layers": 12, "num_heads": 4, "vocab_size": 64}
ASKED = "recommend --epsilon 4 --num-steps 20 --budget 8 --plan-only --engine local --json".split()
ASKED += ["--noise", "correlated", "--bands", "3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return make_model(directory), make_texts(directory)


def fitted(files, capsys, monkeypatch, memory, **flags):
    """The object of `fedsim recommend`, with one small model in the place of the well-known."""
    monkeypatch.setattr(fitting, "WELL_KNOWN", {"small": SMALL})
    flags = {"model": files[0], "data": files[1], "lora-rank": 2, "max-length": 32, **flags}
    flags["device-memory"] = memory
    main([*ASKED, *(str(x) for name, value in flags.items() for x in (f"--{name}", value))])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_is_trained_the_simplest_way_for_which_there_is_room(files, capsys, monkeypatch):
    found = fitted(files, capsys, monkeypatch, "4.8MB")
    own, layers, twice, adapters = found["fits"]
    assert found["device_memory"] == 4_800_000
    assert [each["model"] for each in found["fits"]] == [str(files[0]), *["small"] * 3]
    assert [each["lora_rank"] for each in found["fits"]] == [2, 0, 0, 8]
    assert (own["strategy"], own["devices"]) == ("direct:1", 1)
    assert (layers["strategy"], twice["strategy"]) == ("layers", "twice")
    assert layers["devices"] > twice["devices"] > 1
    assert layers["mesh"] == f"data:1,fsdp:{layers['devices']}"
    for each in found["fits"]:
        assert each["fits"] and each["device_bytes"] <= 0.9 * 4.8e6
        assert each["device_bytes"] == sum(each["parts"].values())
    assert own["trained"] < own["num_parameters"]
    count = layers["trained"]
    assert count == layers["num_parameters"] == adapters["num_parameters"]
    of_each, of_row = 8, 4  # bytes of a number
    assert layers["noise_bytes"] == count * (of_each + (3 - 1) * of_row)


@pytest.mark.ci
@pytest.mark.slow
def test_people_see_a_table_of_what_does_not_fit_too(files, capsys, monkeypatch):
    rule = {"optimizer": "adafactor"}  # which takes no parts of an array
    found = fitted(files, capsys, monkeypatch, "1MB", **rule)
    *_, none = found["fits"]
    assert (none["fits"], none["devices"]) == (False, 1)
    head, names, *lines = fitting.table(found["fits"], found["device_memory"])
    assert "device" in head and names.split()[:3] == ["model", "M", "LoRA"]
    assert len(lines) == len(found["fits"]) and max(map(len, (head, names, *lines))) <= 80
    assert " none " in lines[-1]


@pytest.mark.parametrize("text, size", [("80GiB", 80 * 2**30), ("1.5GB", 1.5e9), ("7MiB", 7340032)])
def test_memory_is_read_with_its_unit(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "0GB", "80Gib", "1e3GB", ""])
def test_memory_without_a_number_and_a_unit_is_a_mistake(text):
    with pytest.raises(ConfigError, match=f"device_memory={text}: expected a number above 0 and"):
        bytes_of(text)
