"""Generation: what the model itself would draw, the same text for the same seed."""

import json

import jax
import numpy as np
import pytest
from pretrained_models import CONFIG, make_model
from zoo import random_like

from fedsim.cli.main import main
from fedsim.generate import draw, tokens_after
from fedsim.models import pretrained
from fedsim.models.pretrained import Pretrained
from fedsim.models.transformer import Transformer


@pytest.fixture(scope="module")
def model():
    return Pretrained(CONFIG, random_like(CONFIG, np.random.default_rng(0)), None)


def test_tokens_are_those_of_the_model_without_a_cache(model):
    ids, count = [256, 7, 30], 8
    key = jax.random.key(0)
    how = {"temperature": 2.0, "top_k": 50, "key": key}
    found = [int(token) for (token,) in tokens_after(model, ids, count, **how)]
    run = jax.jit(lambda tokens: Transformer(CONFIG).apply({"params": model.params}, tokens))
    expected = np.zeros((1, 16), np.int32)
    expected[0, :3] = ids
    for i in range(count):
        expected[0, 3 + i] = draw(run(expected)[:, 2 + i], jax.random.fold_in(key, i), 2.0, 50)[0]
    assert found == expected[0, 3 : 3 + count].tolist() and len(set(found)) > 2


def test_texts_that_are_sampled_together_are_continued_each_by_itself(model):
    """Token by token: what the model draws after each text, had it been the prompt."""
    ids, count, texts = [256], 4, 3
    how = {"temperature": 1.0, "top_k": 0, "key": jax.random.key(1), "texts": texts}
    found = np.stack(list(tokens_after(model, ids, count, **how)), axis=1)
    assert found.shape == (texts, count) and len({*map(tuple, found.tolist())}) == texts
    run = jax.jit(lambda tokens: Transformer(CONFIG).apply({"params": model.params}, tokens))
    whole = np.concatenate([np.full((texts, 1), 256), found], axis=1).astype(np.int32)
    logits = run(np.pad(whole, ((0, 0), (0, 3))))
    for i in range(count):
        again = draw(logits[:, i], jax.random.fold_in(how["key"], i), 1.0, 0)
        np.testing.assert_array_equal(found[:, i], again)


def test_draws_follow_the_logits():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(temperature, top_k):
        drawn = jax.vmap(lambda key: draw(logits[None], key, temperature, top_k)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0, 0), [0.1, 0.2, 0.3, 0.4], atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 2), [0, 0, 3 / 7, 4 / 7], atol=0.03)
    squares = np.array([1, 4, 9, 16]) / 30
    np.testing.assert_allclose(frequencies(0.5, 0), squares, atol=0.03)
    np.testing.assert_array_equal(frequencies(0, 0), [0, 0, 0, 1])


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
        ((directory, "--temperature", "-1"), "temperature=-1.0: expected >= 0"),
        ((directory, "--seed", 2**63), f"seed={2**63}: expected a number of 64 bits"),
        ((bare,), "expected a model with a tokenizer.json"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["generate", *map(str, args)])
        assert stop.value.code == 2 and message in capsys.readouterr().err
