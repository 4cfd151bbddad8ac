"""A run that cannot learn is refused before it spends people's epsilon, or says what happens."""

import numpy as np
import pytest
from pretrained_models import command, make_model, make_texts
from refused import refuses
from safetensors.numpy import load_file, save_file

from fedsim.models import weights

pytestmark = pytest.mark.privacy


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    flags = {"model": make_model(place), "data": make_texts(place), "lora_rank": 2, "num_steps": 1}
    command("train", "uls", run_dir=place / "run", **flags)
    return place


def change(file, name, value, where=0):
    """Put a value into some places of an array of a file, and return the file as it was."""
    before, tensors = file.read_bytes(), load_file(file)
    tensors[name].flat[where] = value
    save_file(tensors, file)
    return before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_array_that_is_not_finite_is_named(value, place):
    source, name = place / "model", "model.layers.0.mlp.up_proj.weight"
    before = change(source / "model.safetensors", name, value)
    with refuses(f"model={source}", says=f"finite numbers in {name}, got nan or infinity"):
        weights.load(str(source))
    (source / "model.safetensors").write_bytes(before)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_loss_that_is_not_finite_ends_a_run_before_its_first_release(
    lora_rank, place, tmp_path, capsys
):
    """Of finite weights. Users' texts decide nothing: a run tells by itself that it started."""
    file = place / "model" / "model.safetensors"
    before = change(file, "model.layers.0.mlp.up_proj.weight", 3e38, slice(None))
    ledger, run = tmp_path / "ledger", tmp_path / "run"
    flags = {"model": place / "model", "data": place / "texts.parquet", "lora_rank": lora_rank}
    with pytest.raises(SystemExit) as stop:
        command("train", "uls", run_dir=run, budget_ledger=ledger, **flags)
    file.write_bytes(before)
    assert stop.value.code == 2 and "on made-up tokens" in capsys.readouterr().err
    assert not run.exists() and not ledger.exists()
