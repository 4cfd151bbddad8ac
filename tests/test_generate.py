"""Generation: the same text for the same seed."""

import json

import numpy as np
import pytest
from pretrained_models import CONFIG, make_model
from zoo import random_like

from fedsim.cli.main import main
from fedsim.models import pretrained


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("generate"))


def generate(directory, *args, capsys):
    main(["generate", str(directory), "--json", *args])
    return json.loads(capsys.readouterr().out)


def test_the_seed_decides_the_text(directory, capsys):
    args = ("--prompt", "red ", "--num-tokens", "12")
    first, again = (generate(directory, *args, capsys=capsys) for _ in range(2))
    other = generate(directory, *args, "--seed", "1", capsys=capsys)
    assert first == again and first["text"] != other["text"] and first["tokens"] <= 12


def test_text_ends_where_the_model_does(directory, capsys):
    found = generate(directory, "--prompt", "x" * 60, "--num-tokens", "50", capsys=capsys)
    assert found["tokens"] <= 3  # of 64 positions
    assert found["stopped"] == "length" and found["max_length"] == 64
    main(["generate", str(directory), "--prompt", "x" * 60, "--num-tokens", "50"])
    assert capsys.readouterr().err.endswith("(the model's length is 64 tokens)\n")
    few = generate(directory, "--prompt", "red ", "--num-tokens", "2", capsys=capsys)
    assert few["stopped"] in ("num_tokens", "end")
    main(["generate", str(directory), "--prompt", "red ", "--num-tokens", "2"])
    assert "length" not in capsys.readouterr().err


def test_mistakes_are_one_line(directory, capsys, tmp_path):
    bare = tmp_path / "bare"
    pretrained.save(bare, CONFIG, random_like(CONFIG, np.random.default_rng(0)))
    for args, message in (
        (("tiny",), "model=tiny: expected the directory of a run or of a Hugging Face model"),
        ((directory, "--prompt", "x" * 64), "prompt=65 tokens: expected fewer than 64 tokens"),
        ((directory, "--temperature", "-1"), "temperature=-1.0: expected 0, or >= 0.001"),
        ((directory, "--top-p", "0"), "top_p=0.0: expected in (0, 1]"),
        ((directory, "--seed", 2**63), f"seed={2**63}: expected a number of 64 bits"),
        ((bare,), "expected a model with a tokenizer.json"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["generate", *map(str, args)])
        assert stop.value.code == 2 and message in capsys.readouterr().err
