"""Models in Hugging Face's format: written and read again, refused in one line, and references."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from zoo import FAMILIES, fields_of, random_like, save_model

from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import ConfigError
from fedsim.models import families, frozen, weights
from fedsim.models.config_json import UnsupportedArchitecture
from fedsim.models.rope import Llama3
from fedsim.models.transformer import Transformer, preset

SCALED = dataclasses.replace(FAMILIES["llama"], rope_scaling=Llama3(8.0, 1.0, 4.0, 64))
CONFIGS = FAMILIES | {
    "llama scaled": SCALED,
    "llama with biases": dataclasses.replace(
        FAMILIES["llama"], query_bias=True, out_bias=True, mlp_bias=True, tied=False
    ),
    "qwen2 with windows": dataclasses.replace(FAMILIES["qwen2"], window=5),
}


def logits_of(config, params, tokens):
    return jax.jit(lambda p, t: Transformer(config).apply({"params": p}, t))(params, tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_comes_back_as_it_was_saved(name, rng, tmp_path):
    config = CONFIGS[name]
    params = random_like(config, rng)
    save_model(tmp_path / "model", config, params)
    found = weights.load(str(tmp_path / "model"))
    kept = dataclasses.replace(
        config,
        max_length=config.table,
        num_positions=None,
        head_width=None if config.positions == "learned" else config.head,
        mlp_width=config.hidden,
    )
    assert found.config == kept and found.tokenizer is None
    assert jax.tree.structure(found.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


def test_the_papers_kind_is_a_gpt2_whose_further_biases_are_zero(rng, tmp_path):
    config = preset("tiny", 31, 12)
    params = random_like(config, rng)
    save_model(tmp_path / "model", config, params)
    found = weights.load(str(tmp_path / "model"))
    assert found.config.query_bias and not found.params["block_0"]["query"]["bias"].any()
    tokens = rng.integers(31, size=(2, 12))
    ours, theirs = logits_of(config, params, tokens), logits_of(*found[:2], tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_names_without_a_prefix_are_gpt2s_too(rng, tmp_path):
    config, params = FAMILIES["gpt2"], random_like(FAMILIES["gpt2"], rng)
    tensors = weights.to_tensors(config, params)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    found = weights.from_tensors("x", config, {**bare, "h.0.attn.bias": np.ones(1, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, found, params)


FIELDS = fields_of(FAMILIES["llama"])
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}
REFUSED = [
    ({"model_type": "mixtral"}, "model_type=mixtral: expected llama or mistral or qwen2"),
    ({"model_type": "\x1b[2J" + "x" * 999}, r"^model_type=\\x1b\[2Jx{50,60}...: expected"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: expected silu"),
    ({"rope_parameters": {"rope_type": "axial"}}, "rope_type=axial: expected default or dynamic"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor=None: expected a value in config.json"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: expected"),
    ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta=inf: expected a number"),
    ({"rope_parameters": LLAMA3}, "low_freq_factor=4.0: expected less than high_freq_factor=4.0"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling=.*: expected the same as in rope_parameters"),
    ({"hidden_size": ...}, "hidden_size=None: expected a value in config.json"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config=.*bitsandbyt"),
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: expected a whole number in \[1"),
    ({"hidden_size": True}, "hidden_size=True: expected a whole number"),
    ({"num_attention_heads": 3}, "num_key_value_heads=2: expected a divisor of num_attention"),
    ({"head_dim": 5}, "head_dim=5: expected an even number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings=false: expected true or false"),
]


@pytest.mark.parametrize("changed, message", REFUSED)
def test_what_the_model_cannot_be_is_refused_by_name(changed, message):
    fields = {name: x for name, x in {**FIELDS, **changed}.items() if x is not ...}
    with pytest.raises(UnsupportedArchitecture, match=message):
        families.config_of(fields)


def test_a_tensor_that_is_missing_or_misshapen_is_named(rng, tmp_path):
    config = FAMILIES["llama"]
    tensors = weights.to_tensors(config, random_like(config, rng))
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=f"expected a tensor {name}, and there is none"):
        weights.from_tensors("x", config, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ConfigError, match=r"block_1/up/kernel of shape .* got \(16, 19\)"):
        weights.from_tensors("x", config, {**tensors, name: tensors[name][1:]})
    whole = {**tensors, name: tensors[name].astype(np.int8)}  # whose scales nobody reads
    with pytest.raises(ConfigError, match=f"expected floating point numbers in {name}, got int8"):
        weights.from_tensors("x", config, whole)


def test_arrays_that_the_model_has_no_place_for_are_refused(rng, tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], tied=True)
    tensors = weights.to_tensors(config, random_like(config, rng))
    embedding, head = tensors["model.embed_tokens.weight"], "lm_head.weight"
    more = {  # constants of older versions, and the embedding once more
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        head: embedding.copy(),
    }
    weights.from_tensors("x", config, {**tensors, **more})
    other = embedding.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], 9)
    bias = "model.layers.0.self_attn.q_proj.bias"
    for name, array in (
        (head, other),
        (head, embedding.astype(np.float16)),
        (bias, np.ones(16, np.float32)),
    ):
        with pytest.raises(ConfigError, match=f"and {name} has none"):
            weights.from_tensors("x", config, {**tensors, name: array})


KEPT = {
    "generation_config.json": '{"eos_token_id": [256, 7], "temperature": 0.6}',
    "tokenizer_config.json": '{"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}',
    "special_tokens_map.json": '{"eos_token": {"content": "<|endoftext|>"}}',
    "chat_template.jinja": "{{ messages }}",
    "added_tokens.json": '{"<|endoftext|>": 256}',
}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2 with windows", "qwen3", "gpt2"])
def test_a_saved_model_has_the_files_of_the_one_it_came_from(name, rng, tmp_path):
    config = dataclasses.replace(CONFIGS[name], vocab_size=257)
    Tokenizer.bytes().save(tmp_path / "bytes.json")
    model, out = tmp_path / "model", tmp_path / "out"
    save_model(model, config, random_like(config, rng), tmp_path / "bytes.json")
    for name, text in KEPT.items():  # which training does not change
        (model / name).write_text(text)
    own = {"bos_token_id": 5, "eos_token_id": [256, 7], "pad_token_id": 9, "x": [1]}
    old = {"torch_dtype": "bfloat16", "auto_map": {"AutoModel": "code.Model"}}
    before = json.loads((model / "config.json").read_text()) | own
    (model / "config.json").write_text(json.dumps(before | old))
    found = weights.load(str(model))
    trained = dataclasses.replace(found.config, max_length=8, num_positions=found.config.table)
    weights.save(out, trained, found.params, found.tokenizer, found.files)
    assert {name: (out / name).read_text() for name in KEPT} == KEPT
    assert (out / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    after = json.loads((out / "config.json").read_text())
    assert after == before | {"dtype": "float32"}  # what is about the weights alone is new
    again = weights.load(str(out))
    assert again.config == found.config
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
    assert Tokenizer.load(again.tokenizer).end_ids == {256, 7}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_saved_model_has_the_type_of_the_one_it_came_from(key, rng, tmp_path):
    config = FAMILIES["llama"]
    params = random_like(config, rng)
    save_model(tmp_path / "model", config, params)
    file = tmp_path / "model" / "config.json"
    fields = json.loads(file.read_text())
    del fields["dtype"]
    file.write_text(json.dumps({**fields, key: "bfloat16"}))
    weights.save(tmp_path / "out", config, params, files=tmp_path / "model")
    found = weights.read_directory(tmp_path / "out")
    assert {str(each.dtype) for each in found.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(frozen.BFLOAT16), params)
    loaded = weights.load(str(tmp_path / "out")).params
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    weights.save(tmp_path / "exact", config, params, files=tmp_path / "model", exact=True)
    exact = weights.load(str(tmp_path / "exact")).params
    jax.tree.map(np.testing.assert_array_equal, exact, params)


def test_the_hub_is_asked_for_the_files_that_are_needed(rng, tmp_path, monkeypatch):
    import huggingface_hub

    config = FAMILIES["llama"]
    save_model(tmp_path / "model", config, random_like(config, rng))

    def download(name, *, revision, allow_patterns):
        if name != "some/model":
            raise huggingface_hub.errors.LocalEntryNotFoundError("404\nnot found")
        assert revision == "v1" and "config.json" in allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.load("hf:some/model@v1").config.width == 16
    with pytest.raises(ConfigError, match="model=hf:other/model: expected a repository with"):
        weights.load("hf:other/model")
