"""GGUF files (llama.cpp): weights, quantised or not, and the tokenizer inside; needs fedsim[gguf].

What was quantised is read as the float32 values it stands for. Llama's queries and keys are stored
with the features of a rotary pair side by side; here, as at Hugging Face, they are half a head
apart.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from fedsim.errors import ConfigError
from fedsim.files import cache_dir, own_directory, write_atomically
from fedsim.models.families import UnsupportedArchitecture
from fedsim.models.transformer import TransformerConfig

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
DENSE = {
    **{"query": "attn_q", "key": "attn_k", "value": "attn_v", "out": "attn_output"},
    **{"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
}
NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
HEAD_NORMS = {"query_norm": "attn_q_norm", "key_norm": "attn_k_norm"}
CONTROL = 3  # the type of special tokens


class Found(NamedTuple):
    """What a file has."""

    config: TransformerConfig
    params: Any
    tokenizer: Path | None
    """As `tokenizer_beside`."""


def load(file: Path, heard: Callable[[int, int], None]) -> Found:
    """The model of a file.

    Args: heard: told how many of how many arrays are read.
    Raises: ConfigError: it is none, or of another architecture, or `gguf` is not installed.
    """
    reader = _reader(file)
    about = {name: field.contents() for name, field in reader.fields.items()}
    kind = about.get("general.architecture")
    if kind not in ARCHITECTURES:
        expected = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitecture(f"general.architecture={kind}: expected one of {expected}")
    from gguf.quants import dequantize

    tensors = {}
    for number, tensor in enumerate(reader.tensors, 1):
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        tensors[tensor.name] = values.reshape(shape)
        heard(number, len(reader.tensors))
    if "rope_freqs.weight" in tensors or f"{kind}.rope.scaling.type" in about:
        raise UnsupportedArchitecture(f"model={file}: expected rotary positions without scaling")
    try:
        config = _config(kind, about, tensors)
        return Found(config, _params(kind, config, tensors), tokenizer_beside(file, about))
    except KeyError as error:
        raise ConfigError(f"model={file}: expected {error} in it") from None


def _config(kind: str, about: dict[str, Any], tensors: dict[str, Any]) -> TransformerConfig:
    heads, width = about[f"{kind}.attention.head_count"], about[f"{kind}.embedding_length"]
    return TransformerConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        max_length=about[f"{kind}.context_length"],
        width=width,
        num_layers=about[f"{kind}.block_count"],
        num_heads=heads,
        num_kv_heads=about.get(f"{kind}.attention.head_count_kv", heads),
        head_width=about.get(f"{kind}.attention.key_length"),
        mlp_width=about[f"{kind}.feed_forward_length"],
        norm="rms",
        norm_epsilon=float(np.float32(about[f"{kind}.attention.layer_norm_rms_epsilon"])),
        query_key_norm=kind == "qwen3",
        positions="rope",
        rope_base=float(about.get(f"{kind}.rope.freq_base", 10_000.0)),
        mlp="swiglu",
        query_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tied="output.weight" not in tensors,
    )


def _params(kind: str, c: TransformerConfig, tensors: dict[str, np.ndarray]) -> Any:
    leaves: dict[tuple[str, ...], np.ndarray] = {
        ("embed", "embedding"): tensors["token_embd.weight"],
        ("final_norm", "scale"): tensors["output_norm.weight"],
    }
    if not c.tied:
        leaves["head", "kernel"] = tensors["output.weight"].T
    norms = NORMS | (HEAD_NORMS if c.query_key_norm else {})
    for i in range(c.num_layers):
        for ours, theirs in norms.items():
            leaves[f"block_{i}", ours, "scale"] = tensors[f"blk.{i}.{theirs}.weight"]
        for ours, theirs in DENSE.items():
            for name, suffix in (("kernel", "weight"), ("bias", "bias")):
                tensor = tensors.get(f"blk.{i}.{theirs}.{suffix}")
                if tensor is None and name == "bias":
                    continue
                tensor = tensors[f"blk.{i}.{theirs}.{suffix}"]
                if kind == "llama" and ours in ("query", "key"):
                    heads = c.num_heads if ours == "query" else c.kv_heads
                    tensor = halves_apart(tensor, heads)
                leaves[f"block_{i}", ours, name] = np.ascontiguousarray(tensor.T)
    return traverse_util.unflatten_dict(leaves)


def halves_apart(tensor: np.ndarray, heads: int) -> np.ndarray:
    """[heads * K, ...] with rotary pairs side by side -> the same with pairs K / 2 apart."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def tokenizer_beside(file: Path, about: dict[str, Any]) -> Path | None:
    """tokenizer.json beside the file, or the one inside it, written to the cache.

    None where its kind is not known: then the file beside it is needed.
    Args: about: the fields of the file.
    """
    beside = file.with_name("tokenizer.json")
    if beside.is_file():
        return beside
    text = _tokenizer(about)
    if text is None:
        return None
    directory = own_directory(cache_dir() / "tokenizers")
    size, changed = file.stat().st_size, file.stat().st_mtime_ns
    out = directory / f"{file.stem}-{size}-{changed}.json"
    if not out.is_file():
        write_atomically(out, text.encode())
    return out


def _tokenizer(about: dict[str, Any]) -> str | None:
    """The byte-level BPE inside as a tokenizer.json, where it splits words in a way known here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, splits = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or splits not in ("smollm", "gpt-2", "default"):
        return None
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splits == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.Sequence([digits, words])
    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer, inner.decoder = words, decoders.ByteLevel()
    types = about.get("tokenizer.ggml.token_type", ())
    special = [t for t, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return json.dumps(json.loads(inner.to_str()), ensure_ascii=False)


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        message = "expected the package gguf: pip install 'fedsim[gguf]'"
        raise ConfigError(f"model={file}: {message}") from None
    if not file.is_file():
        raise ConfigError(f"model={file}: expected a file that exists")
    try:
        return GGUFReader(file)
    except Exception as error:  # as many kinds as there are ways to be no such file
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"model={file}: expected a GGUF file ({reason})") from None
