"""GGUF files (llama.cpp): weights, quantised or not, and the tokenizer inside. Extra: `gguf`.

Quantised weights are read as the float32 values that they represent. GGUF stores the queries and
keys of Llama with the two features of a rotary pair side by side; here, as in Hugging Face's files,
they are half a head apart.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from fedsim.errors import ConfigError, brief
from fedsim.files import cache_dir, keep_in_cache, own_directory
from fedsim.installation import optional
from fedsim.models import config_json, model_files
from fedsim.models.config_json import UnsupportedArchitecture, number, whole
from fedsim.models.families import check_heads
from fedsim.models.transformer import TransformerConfig

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
DENSE = {
    **{"query": "attn_q", "key": "attn_k", "value": "attn_v", "out": "attn_output"},
    **{"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
}
NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
HEAD_NORMS = {"query_norm": "attn_q_norm", "key_norm": "attn_k_norm"}
CONTROL, USER_DEFINED = 3, 4  # types of special tokens, and of such that a text is not split in


def load(
    file: Path, heard: Callable[[int, int], None]
) -> tuple[TransformerConfig, Any, Path | None]:
    """(Settings, parameters, directory of the side files; see `files_of`) of a GGUF file.

    Args:
      heard: called with (number of arrays that are read, number of arrays).
    Raises:
      ConfigError: the file is not GGUF or of another architecture, or `gguf` is not installed.
    """
    reader = _reader(file)
    about = _about(file, reader)
    kind = about.get("general.architecture")
    if kind not in ARCHITECTURES:
        expected = f"one of {', '.join(ARCHITECTURES)}"
        raise UnsupportedArchitecture.of("general.architecture", brief(kind), expected)
    from gguf.quants import dequantize

    try:
        tensors = {}
        for done, tensor in enumerate(reader.tensors, 1):
            shape = tuple(int(size) for size in reversed(tensor.shape))
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            tensors[tensor.name] = values.reshape(shape)
            heard(done, len(reader.tensors))
        return _found(file, str(kind), about, tensors)
    except KeyError as error:
        raise ConfigError.of("model", file, f"{error} in it") from None
    except (ConfigError, OSError):
        raise
    except Exception as error:  # the file contradicts itself
        raise _no_file(file, error) from None


def tokenizer_of(file: Path) -> Path:
    """Path of the tokenizer.json of a GGUF file, with its chat template beside it.

    Raises:
      ConfigError: the file is not GGUF, or its tokenizer is of an unknown kind.
    """
    files = files_of(file, _about(file, _reader(file)))
    if files is None:
        raise ConfigError.of("tokenizer", file, "a tokenizer.json beside it")
    return files / model_files.TOKENIZER


def _about(file: Path, reader: Any) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the file contradicts itself
        raise _no_file(file, error) from None


def _found(
    file: Path, kind: str, about: dict[str, Any], tensors: dict[str, np.ndarray]
) -> tuple[TransformerConfig, Any, Path | None]:
    factors = (about.get(f"{kind}.rope.{name}", 1) for name in ("scaling.factor", "scale_linear"))
    scaled = f"{kind}.rope.scaling.type" in about or any(factor != 1 for factor in factors)
    if scaled or "rope_freqs.weight" in tensors:
        raise UnsupportedArchitecture.of("model", file, "rotary positions without scaling")
    config = _config(kind, about, tensors)
    used: set[str] = set()
    params = _params(kind, config, tensors, used)
    model_files.expect_none_left(str(file), [name for name in tensors if name not in used])
    return config, params, files_of(file, about)


def _config(kind: str, about: dict[str, Any], tensors: dict[str, Any]) -> TransformerConfig:
    attention = f"{kind}.attention"
    heads = whole(about, f"{attention}.head_count", config_json.HEADS)
    epsilon = number(about, f"{attention}.layer_norm_rms_epsilon", 0, 1)
    config = TransformerConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        max_length=whole(about, f"{kind}.context_length", config_json.LENGTH),
        width=whole(about, f"{kind}.embedding_length", config_json.WIDTH),
        num_layers=whole(about, f"{kind}.block_count", config_json.LAYERS),
        num_heads=heads,
        num_kv_heads=whole(about, f"{attention}.head_count_kv", config_json.HEADS, heads),
        head_width=whole(about, f"{attention}.key_length", config_json.HEADS, None),
        mlp_width=whole(about, f"{kind}.feed_forward_length", config_json.WIDTH),
        norm="rms",
        norm_epsilon=float(np.float32(epsilon)),
        query_key_norm=kind == "qwen3",
        positions="rope",
        rope_base=number(about, f"{kind}.rope.freq_base", *config_json.BASES, 10_000.0),
        mlp="swiglu",
        query_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tied="output.weight" not in tensors,
    )
    check_heads(config)
    return config


def _params(kind: str, c: TransformerConfig, tensors: dict[str, np.ndarray], used: set[str]) -> Any:
    def take(name: str) -> np.ndarray:
        used.add(name)
        return tensors[name]

    leaves: dict[tuple[str, ...], np.ndarray] = {
        ("embed", "embedding"): take("token_embd.weight"),
        ("final_norm", "scale"): take("output_norm.weight"),
    }
    if not c.tied:
        leaves["head", "kernel"] = take("output.weight").T
    norms = NORMS | (HEAD_NORMS if c.query_key_norm else {})
    for i in range(c.num_layers):
        for ours, theirs in norms.items():
            leaves[f"block_{i}", ours, "scale"] = take(f"blk.{i}.{theirs}.weight")
        for ours, theirs in DENSE.items():
            for name, suffix in (("kernel", "weight"), ("bias", "bias")):
                if name == "bias" and f"blk.{i}.{theirs}.{suffix}" not in tensors:
                    continue
                tensor = take(f"blk.{i}.{theirs}.{suffix}")
                if kind == "llama" and ours in ("query", "key"):
                    heads = c.num_heads if ours == "query" else c.kv_heads
                    tensor = halves_apart(tensor, heads)
                leaves[f"block_{i}", ours, name] = np.ascontiguousarray(tensor.T)
    return traverse_util.unflatten_dict(leaves)


def halves_apart(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Move rotary pairs of a tensor [heads * K, ...] from side by side to K / 2 apart."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def files_of(file: Path, about: dict[str, Any]) -> Path | None:
    """Write tokenizer.json and tokenizer_config.json of a GGUF file into a directory of the cache.

    The tokenizer.json is a copy of the one beside the file, or made of the content of the file. The
    tokenizer_config.json has the begin and end tokens and the chat template of the file.

    Args:
      about: fields of the file.
    Returns:
      The directory; None if the tokenizer is of an unknown kind, and no tokenizer.json lies beside
      the file.
    """
    beside = file.with_name("tokenizer.json")
    text = beside.read_bytes() if beside.is_file() else _tokenizer(about)
    if text is None:
        return None
    size, changed = file.stat().st_size, file.stat().st_mtime_ns
    directory = own_directory(cache_dir() / "tokenizers" / f"{file.stem}-{size}-{changed}")
    settings = json.dumps(_settings(about), indent=2, ensure_ascii=False).encode()
    for name, data in (("tokenizer.json", text), ("tokenizer_config.json", settings)):
        out = directory / name
        if (
            not out.is_file() or out.read_bytes() != data
        ):  # the content of the GGUF file takes precedence
            keep_in_cache(out, data)
    return directory


def _settings(about: dict[str, Any]) -> dict[str, Any]:
    """Fields of a tokenizer_config.json that `transformers` reads, as far as the file has them."""
    tokens = about.get("tokenizer.ggml.tokens", ())
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        number = about.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[f"{SHORT.get(name, name)}_token"] = tokens[number]
    if (template := about.get("tokenizer.chat_template")) is not None:
        found["chat_template"] = template
    return found | {"clean_up_tokenization_spaces": False}


SHORT = {"unknown": "unk", "padding": "pad"}


def _tokenizer(about: dict[str, Any]) -> bytes | None:
    """The byte-level BPE of a file as a tokenizer.json; None if its split of words is unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, splits = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre")
    if kind != "gpt2" or splits not in ("smollm", "gpt-2"):
        return None  # old files do not say how words are split, whatever their model
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
    whole = [t for t, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
    return json.dumps(json.loads(inner.to_str()), ensure_ascii=False).encode()


def _reader(file: Path) -> Any:
    with optional():
        from gguf import GGUFReader
    if not file.is_file():
        raise ConfigError.of("model", file, "a file that exists")

    class Reader(GGUFReader):
        """Reads fields as plain arrays: slices of a memory map take four times as long."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

    try:
        return Reader(file)
    except Exception as error:  # the library raises errors of many types
        raise _no_file(file, error) from None


def _no_file(file: Path, error: Exception) -> ConfigError:
    reason = brief(" ".join(str(error).split()), 200)
    return ConfigError.of("model", file, f"a GGUF file ({reason})")
