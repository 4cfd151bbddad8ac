"""Random search: a model whose config.json has another value loads, or is refused in one line.

What loads must be a model that can be applied. Damaged arrays: test_tensor_files.py.
"""

import dataclasses
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import config_of
from zoo import FAMILIES, random_like, write_in_two

from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import FedsimError
from fedsim.models import weights
from fedsim.models.transformer import Transformer
from fedsim.run.model_source import find_model

VOCAB = 257
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma3", "phi3", "smollm3")
ODD = [
    *(None, True, False, 0, -1, 1, 2, 3, 5, 7, 97, 10**6, 10**9, 2**31, 2**63, 10**30, 10**4000),
    *(0.0, -0.5, 0.5, 1.0, 16.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "16", "x", "false", "\x1b[2J\n", "\ud83d", [], [0], ["x"], [[]], {}, {"x": 1}),
    {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 1}
    | {"original_max_position_embeddings": 0},
    {"rope_theta": "x"},
    {"rope_type": "yarn", "rope_theta": 1.001, "factor": 2**20, "beta_fast": 1 / 1024},
    {"rope_type": "longrope", "short_factor": [1.0] * 4},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": []},
]
MORE = "sliding_window use_sliding_window max_window_layers layer_types rope_scaling".split()
MORE += "head_dim quantization_config attention_bias mlp_bias n_inner partial_rotary_factor".split()
MORE += "no_rope_layers query_pre_attn_scalar final_logit_softcapping".split()
MORE += "original_max_position_embeddings rope_local_base_freq".split()
MORE += "activation_function scale_attn_weights bos_token_id eos_token_id".split()


def make(kind, directory):
    """A small model of a family, with the byte tokenizer; that of qwen3 is in two files."""
    config = FAMILIES[kind] if kind in FAMILIES else config_of(kind)
    config = dataclasses.replace(config, vocab_size=VOCAB)
    params = random_like(config, np.random.default_rng(0))
    Tokenizer.bytes().save(directory / "bytes.json")
    out = directory / kind
    weights.save(out, config, params, directory / "bytes.json")
    if kind == "qwen3":
        (out / weights.SINGLE).unlink()
        write_in_two(out, weights.to_tensors(config, params))
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {kind: make(kind, directory) for kind in KINDS}


def outcome(directory):
    """What using a model's directory ends with: "loaded", or the line that refuses it."""
    try:
        model = find_model(str(directory))
        assert model is not None
        if model.tokenizer is not None:
            own = Tokenizer.load(model.tokenizer)
            assert max(own.begin_id, own.end_id) < own.vocab_size
        tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
        apply = Transformer(model.config).apply
        logits = jax.eval_shape(apply, {"params": model.params}, tokens)
        assert logits.shape == (1, 3, model.config.vocab_size)
    except FedsimError as error:
        line = str(error)
        assert "\n" not in line and line.isprintable() and len(line) < 600, line
        return line
    return "loaded"


def change_config(rng, directory):
    """Gives one or two fields of config.json another value, or none."""
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    for _ in range(rng.choice([1, 1, 1, 2])):
        target, names = fields, [*fields, *MORE]
        if rng.random() < 0.3 and isinstance(fields.get("rope_parameters"), dict):
            target = fields["rope_parameters"]
            names = [*target, "rope_theta", "rope_type", "factor", "low_freq_factor"]
        name, value = rng.choice(names), rng.choice([*ODD, ...])
        target.pop(name, None)
        if value is not ...:
            target[name] = value
    file.write_text(json.dumps(fields))


SEARCHES = [(0, 40), *(pytest.param(seed, 300, marks=[pytest.mark.slow]) for seed in (1, 2, 3))]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed, cases", SEARCHES)
def test_a_changed_model_is_a_line_or_a_model(seed, cases, models, tmp_path):
    rng, found = random.Random(seed), []
    for number in range(cases):
        directory = tmp_path / str(number)
        shutil.copytree(models[rng.choice(KINDS)], directory)
        change_config(rng, directory)
        found.append(outcome(directory))
        shutil.rmtree(directory)
    assert 0.05 < found.count("loaded") / cases < 0.9


def test_the_search_has_models_that_load(models):
    assert {outcome(directory) for directory in models.values()} == {"loaded"}
