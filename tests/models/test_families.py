"""Every family has the logits of `transformers`, whose numbers are in logits.json, and comes back.

experiments/benchmarks/peers/transformers_models.py makes the file; test_parity.py, which is slow,
compares with `transformers` itself.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from refused import refuses

from fedsim.models import families, weights
from fedsim.models.config_json import UnsupportedArchitecture
from fedsim.models.transformer import Transformer, TransformerConfig

MODELS = json.loads((Path(__file__).parent / "logits.json").read_text())["models"]
TOKENS = np.random.default_rng(0).integers(0, 61, size=(2, 20))


def tensors_of(name):
    """The arrays of a model, as its file has them: drawn in the order of their names."""
    some = MODELS[name]["shapes"]
    shapes = some | {name.replace(".0.", ".1.", 1): shape for name, shape in some.items()}
    rng, names = np.random.default_rng(0), sorted(shapes, key=lambda n: (n == families.HEAD, n))
    return {name: rng.normal(0, 0.3, shapes[name]).astype(np.float32) for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    config = families.config_of(MODELS[name]["config"])
    params = weights.from_tensors(name, config, tensors_of(name))
    apply = jax.jit(lambda params: Transformer(config).apply({"params": params}, TOKENS))
    expected = np.array(MODELS[name]["logits"])
    assert expected.std() > 0.2
    np.testing.assert_allclose(apply(params)[:, 4::5, ::9], expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_come_back_in_the_same_family(name):
    fields, tensors = MODELS[name]["config"], tensors_of(name)
    config = families.config_of(fields)
    assert fields["model_type"] == config.family
    again = TransformerConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and again.family == config.family
    params = weights.from_tensors(name, config, tensors)
    found = weights.to_tensors(config, params)
    assert found.keys() == tensors.keys()
    for key, expected in tensors.items():  # 1 + w is rounded, in `transformers` too
        np.testing.assert_allclose(found[key], expected, rtol=0, atol=2**-23)
    back = weights.from_tensors(name, config, found)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def config_of(name, **changed):
    fields = {n: x for n, x in (MODELS[name]["config"] | changed).items() if x is not ...}
    return families.config_of(fields)


def test_fields_that_old_files_lack_or_place_elsewhere():
    absent = dict.fromkeys(("layer_types", "sliding_window", "_sliding_window_pattern"), ...)
    gemma2 = config_of("gemma2", **absent, attn_logit_softcapping=..., num_hidden_layers=3)
    assert gemma2.attention_cap == 50 and gemma2.window == 4096
    assert gemma2.window_blocks == (True, False, True) and gemma2.tied
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "num_hidden_layers": 7}
    scaled = {"rope_type": "linear", "factor": 8.0}
    gemma3 = config_of("gemma3", **absent, **old, rope_parameters=..., rope_scaling=scaled)
    assert gemma3.window_blocks == (True,) * 5 + (False, True)
    assert (gemma3.rope_base, gemma3.window_rope_base) == (5e5, 2e4)
    assert [gemma3.of_block(i).rope_base for i in (4, 5)] == [2e4, 5e5]
    assert gemma3.of_block(5).rope_scaling.factor == 8 and gemma3.of_block(4).rope_scaling is None
    smollm3 = config_of("smollm3", no_rope_layers=..., layer_types=..., num_hidden_layers=5)
    assert smollm3.rope_blocks == (True, True, True, False, True)
    assert smollm3.of_block(3).positions == "none" and smollm3.of_block(4).positions == "rope"
    mistral = config_of("ministral", model_type="mistral")
    assert mistral.family == "ministral" and mistral.window_blocks == (False, True)
    dynamic = config_of("llama_dynamic")  # texts beyond its context are refused
    assert dynamic.table == 64 and dynamic.rope_scaling is None


def test_a_model_that_is_none_of_gpt2_needs_a_config_of_its_own():
    for name in ("gemma2", "phi3"):
        with refuses("family", UnsupportedArchitecture):
            families.fields_of(dataclasses.replace(config_of(name), family="gpt2"))


REFUSED = [
    ("gemma2", "use_bidirectional_attention", True),
    ("gemma2", "hidden_activation", "gelu"),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma2", "final_logit_softcapping", 0),
    ("gemma2", "layer_types", ["full_attention"]),
    ("phi3", "layer_types", ["full_attention", "sliding_attention"]),
    ("phi3", "rope_scaling", {"type": "su", "short_factor": [1.0] * 4}),
    ("phi3", "partial_rotary_factor", 0.5),
    ("smollm3", "use_sliding_window", True),
    ("llama3", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen3", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("smollm3", "no_rope_layers", [1, 2]),
    ("granite", "logits_scaling", 0),
    ("llama_linear", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("llama_linear", "rope_scaling", {"rope_type": "linear", "factor": 99.0}),
    ("gemma3", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
]


@pytest.mark.parametrize("name, field, value", REFUSED)
def test_what_a_family_cannot_be_is_one_line(name, field, value):
    rope = dict(MODELS[name]["config"].get("rope_parameters") or {})
    there = field == "partial_rotary_factor"
    changed = {"rope_parameters": rope | {field: value}} if there else {field: value}
    with refuses(field, UnsupportedArchitecture):
        config_of(name, **changed)
