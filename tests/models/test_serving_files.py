"""Exported models are served as they were trained: template, end tokens, special tokens."""

import json

import pytest
from chats import CHATML, STOP, model_files as tokenizer_files, tiny

from fedsim.data.tokenizer import Tokenizer
from fedsim.models import weights

GEMMA = CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", "<turn>")


def read(directory, name):
    return json.loads((directory / name).read_text())


def ends(directory):
    """Texts of the tokens at which a program stops."""
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    ids = read(directory, "generation_config.json")["eos_token_id"]
    return [tokenizer.decode([number], special=True) for number in ids]


def test_the_end_of_a_turn_ends_a_text(tmp_path):
    """Also where the model's own end token is another, as of a base model with a new template."""
    model = tokenizer_files(tmp_path / "model", GEMMA)
    tiny(special=("<s>", "<turn>", STOP)).save(model / "tokenizer.json")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": STOP})
    )
    (model / "generation_config.json").write_text('{"eos_token_id": 259, "top_p": 0.5}')
    weights.add_end_tokens(model)
    assert ends(model) == [STOP, "<turn>"]
    assert read(model, "generation_config.json")["top_p"] == 0.5


def test_complete_files_keep_their_bytes(tmp_path):
    model = tokenizer_files(tmp_path / "model")
    weights.add_end_tokens(model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert ends(model) == [STOP]
    weights.add_end_tokens(model)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% if %}", "{{ messages }}"])
def test_a_template_that_shows_no_chat_adds_no_end(template, tmp_path):
    model = tokenizer_files(tmp_path / "model", template)
    weights.add_end_tokens(model)
    assert ends(model) == [STOP]
