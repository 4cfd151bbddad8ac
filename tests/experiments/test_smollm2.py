"""SmolLM2's file becomes a directory with the arrays, the tokens and the template inside."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from zoo import FAMILIES, random_like

from experiments.harness import smollm2
from fedsim.data.chat import template_of
from fedsim.data.tokenizer import Tokenizer
from fedsim.models import families, weights

gguf = pytest.importorskip("gguf")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]
SIZES = {
    **{"context_length": 12, "embedding_length": 16, "block_count": 2, "feed_forward_length": 20},
    **{"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e5},
}


def side_by_side(tensor, heads):
    """The opposite of `halves_apart`."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write(file, tensors):
    """A file with arrays of a directory in Hugging Face's format."""
    writer = gguf.GGUFWriter(str(file), "llama")
    for name, value in SIZES.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([smollm2.CONTROL] * 3 + [1] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    theirs = {ours: name for name, ours in smollm2.OUTSIDE.items()}
    arrays = {ours: name for name, ours in smollm2.ARRAYS.items()}
    for name, values in tensors.items():
        if name not in theirs:
            _, _, layer, array = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(array)
            values = values if heads is None else side_by_side(values, heads)
        named = theirs.get(name) or f"blk.{layer}.{arrays[array]}.weight"
        writer.add_tensor(named, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rotary_pairs_side_by_side_become_half_a_head_apart():
    rows = np.arange(12)[:, None]  # two heads of three pairs
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    np.testing.assert_array_equal(smollm2.halves_apart(rows, 2)[:, 0], expected)


def test_the_directory_has_what_is_in_the_file(rng, tmp_path, monkeypatch):
    size = {"vocab_size": len(TOKENS), "max_length": 12, "rope_base": 1e5, "tied": True}
    size["norm_epsilon"] = float(np.float32(1e-5))  # as the file has it
    config = dataclasses.replace(FAMILIES["llama"], **size)
    params = random_like(config, rng)
    weights.save(tmp_path / "before", config, params)
    write(tmp_path / "a.gguf", load_file(tmp_path / "before" / "model.safetensors"))
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path / "a.gguf"))
    found = weights.load(str(smollm2.directory()))
    assert smollm2.directory() == found.files and len([*found.files.parent.iterdir()]) == 1
    assert families.described(found.config) == families.described(config)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    tokens = Tokenizer.load(found.tokenizer)
    assert (tokens.begin, tokens.end) == ("<|im_start|>", "<|im_end|>")
    assert tokens.encode_batch(["ab", "ba"]) == [[5], [4, 3]]
    template = template_of(tokens)
    assert template is not None and template.source == "{{ messages }}"
