"""A pretrained model in a run: its tokens, its length, fine-tuned whole; what does not fit."""

import json

import jax
import pytest
from learnt import learnt
from pretrained_models import command, make_model, make_texts

from fedsim.config import DataConfig
from fedsim.data import tokenizer_is_public
from fedsim.data.corpora import load
from fedsim.run.model_source import find_model, load_data, model_of_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    return make_model(directory), make_texts(directory), directory


@pytest.mark.slow
def test_a_model_is_trained_whole_on_its_own_tokens(place):
    model, texts, directory = place
    found = command("train", "els", run_dir=directory / "run", model=model, data=texts)
    expected = sum(leaf.size for leaf in jax.tree.leaves(find_model(str(model)).params))
    assert found["num_parameters"] == expected and found["steps_done"] == 2
    config = json.loads((directory / "run" / "config.json").read_text())
    assert config["model"]["max_length"] == 32 and config["model"]["num_positions"] == 64
    again = model_of_run(directory / "run")
    assert again.tokenizer == directory / "run" / "model" / "tokenizer.json"  # as the model has it
    # ... and a run is a model to start from.
    second = command("train", "uls", run_dir=directory / "2", model=directory / "run", data=texts)
    assert second["initial_eval_loss"] == pytest.approx(found["final_eval_loss"], rel=1e-5)


def refused(place, capsys, **flags):
    model, texts, directory = place
    run_dir = directory / "refused"
    with pytest.raises(SystemExit) as stop:
        command("train", "uls", **{"run_dir": run_dir, "model": model, "data": texts, **flags})
    assert stop.value.code == 2 and not run_dir.exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_data_of_other_tokens_are_refused(place, capsys):
    model, texts, directory = place
    other = learnt("bpe", ["some words"], 300, directory / "other.json")
    error = refused(place, capsys, tokenizer=other)
    assert "(tokens of other.json): expected tokens of model=" in error
    assert f"as tokenizer={model / 'tokenizer.json'} of `fedsim data build` gives" in error
    built = load(texts, tokenizer=other, max_length=32).path
    assert "expected tokens of model=" in refused(place, capsys, data=built, max_length=None)


@pytest.mark.privacy
def test_a_tokenizer_file_stays_outside_the_guarantee_in_models_that_follow(place, tmp_path):
    """In Hugging Face's directories it is given with the model; a run's may be of users' texts."""
    model, texts, _ = place
    config, found = DataConfig(str(texts), max_length=32), find_model(str(model))
    assert tokenizer_is_public(load_data(config, found, print).metadata)
    file = learnt("bpe", ["some words"], 300, tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"plan": {}}')  # of a run
    of_run = found._replace(tokenizer=file)
    assert not tokenizer_is_public(load_data(config, of_run, print).metadata)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"max_length": 65}, "max_length=65: expected <= 64, the model's longest"),
        ({"model": "tiny", "lora_rank": 2}, "lora_rank=2: expected 0: fresh models"),
        ({"model": "huge"}, "model=huge: expected one of micro, tiny, small"),
        ({"model": "/no/one"}, "model=/no/one: expected a directory that exists"),
        (
            {"lora_rank": 2, "lora_modules": "head"},
            "lora_modules=head: expected all-linear, or some of q_proj, k_proj, v_proj, o_proj",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(flags, message, place, capsys):
    assert message in refused(place, capsys, **flags)
