"""Small `flax.linen` models that hold every layer the strategies know, and some that none does."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, traverse_util

from fedsim.data.tokenizer import Tokenizer
from fedsim.models import families, weights
from fedsim.models.rope import Linear, Llama3
from fedsim.models.transformer import Transformer, TransformerConfig

VOCAB, LENGTH = 29, 5
BIASES = nn.initializers.normal(0.3)


class Tied(nn.Module):
    """Tokens to logits by one embedding, looked up twice and attended to once."""

    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(VOCAB, self.width, dtype=self.dtype, name="embed")
        positions = nn.Embed(LENGTH, self.width, dtype=self.dtype, name="positions")
        tokens = batch["tokens"]
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = embed(tokens) + positions(at) + 0.5 * embed(before)
        x = nn.LayerNorm(dtype=self.dtype, bias_init=BIASES)(x)
        shared = nn.Dense(self.width, bias_init=BIASES, dtype=self.dtype)
        x = x + nn.tanh(shared(nn.tanh(shared(x))))
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x))


class Untied(nn.Module):
    """Layers with and without biases and scales, on inputs of two, three and four axes."""

    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, batch):
        tokens, own = batch["tokens"], {"dtype": self.dtype}
        x = nn.Embed(VOCAB, self.width, embedding_init=BIASES, **own)(tokens)
        x = nn.LayerNorm(use_bias=False, **own)(x)
        q, k = (nn.Dense(self.width, use_bias=False, **own)(x) for _ in range(2))  # one input
        x = x + nn.tanh(q * k)
        x = nn.LayerNorm(use_scale=False, bias_init=BIASES, epsilon=1e-3, **own)(x)
        pair = x.reshape(*x.shape[:2], 2, -1)  # [rows, length, 2, half]
        x = x + nn.Dense(self.width // 2, **own)(nn.RMSNorm(**own)(pair)).reshape(x.shape)
        pooled = nn.Dense(self.width, bias_init=BIASES, **own)(x.mean(axis=1))  # [rows, width]
        kind = nn.Embed(3, self.width, **own)(batch["kind"])  # one id per row
        x = x + nn.tanh(pooled + kind)[:, None]
        return nn.Dense(VOCAB, **own)(x)


def losses_of(model):
    """Mean cross entropy per row, float32, of its first `sizes` tokens."""

    def losses(params, batch):
        logits = model.apply({"params": params}, batch).astype(jnp.float32)
        each = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), (batch["tokens"] * 7 % VOCAB)[..., None], axis=-1
        )[..., 0]
        length = batch["tokens"].shape[1]
        real = jnp.arange(length)[None] < batch["sizes"][:, None]
        return jnp.sum(jnp.where(real, each, 0), axis=1) / jnp.maximum(batch["sizes"], 1)

    return losses


def random_batch(rng, units, group, length=LENGTH):
    """Rows of all sizes whose tokens repeat."""
    shape = (units, group)
    few = rng.integers(1, VOCAB + 1)
    return {
        "tokens": rng.integers(few, size=(*shape, length)).astype(np.int32),
        "sizes": rng.integers(length + 1, size=shape).astype(np.int32),
        "kind": rng.integers(3, size=shape).astype(np.int32),
    }


def random_params(model, rng):
    """Every parameter random, also those that start at 0 or 1."""
    rows = jax.tree.map(lambda leaf: leaf[0], random_batch(rng, 1, 2))
    fresh = jax.eval_shape(model.init, jax.random.key(0), rows)["params"]
    return jax.tree.map(
        lambda leaf: rng.normal(0, 1 / np.sqrt(leaf.shape[0]), leaf.shape).astype(np.float32), fresh
    )


class ByHand(nn.Module):
    """Linear in its parameters: inputs and cotangents of all layers are given by the batch.

    Sizes such that norms of `gram` and `tied_gram` come from Grams where a unit has two tokens, and
    those of the other layers from gradients.
    """

    dtype: Any = None

    @nn.compact
    def __call__(self, batch):
        own = {"dtype": self.dtype}
        x, c, ids = batch["x"], batch["c"], batch["ids"]

        def dot(c, y):  # [rows, tokens, features] -> [rows]
            return jnp.sum(c * y.astype(jnp.float32), axis=(1, 2))

        total = dot(c, nn.Dense(8, use_bias=False, name="gram", **own)(x))
        total += dot(c[..., :4], nn.Dense(4, name="direct", **own)(x[..., :4]))
        for name, size in (("tied_gram", 8), ("tied_direct", 4)):
            embed = nn.Embed(size, size, name=name, **own)
            total += dot(c[..., :size], embed.attend(x[..., :size]))
            total += dot(c[..., -size:], embed(ids))
        return total


SIZES = (VOCAB, 12, 16, 2, 4)
_FAMILY: dict[str, Any] = {"norm": "rms", "norm_epsilon": 1e-5, "positions": "rope"}
_FAMILY |= {"mlp": "swiglu", "mlp_bias": False, "mlp_width": 20, "num_kv_heads": 2}
FAMILIES = {
    "llama": TransformerConfig(*SIZES, **_FAMILY, family="llama"),
    "mistral": TransformerConfig(*SIZES, **_FAMILY, tied=False, window=5, family="mistral"),
    "qwen2": TransformerConfig(*SIZES, **_FAMILY, query_bias=True, rope_base=1e6, family="qwen2"),
    "qwen3": TransformerConfig(
        *SIZES, **_FAMILY, tied=False, query_key_norm=True, head_width=6, family="qwen3"
    ),
    "gpt2": TransformerConfig(
        *SIZES, num_positions=15, query_bias=True, out_bias=True, norm_epsilon=1e-5
    ),
}
PARTS = FAMILIES | {  # two that have all options of the families beside them
    "capped": TransformerConfig(
        *SIZES,
        **_FAMILY | {"mlp": "geglu"},
        norms="both",
        query_key_norm=True,
        head_width=6,
        window=5,
        window_blocks=(True, False),
        window_rope_base=100.0,
        rope_scaling=Linear(4.0),
        attention_scale=0.3,
        attention_cap=2.0,
        embedding_multiplier=4.0,
        logit_cap=3.0,
    ),
    "turned": TransformerConfig(
        *SIZES,
        **_FAMILY,
        norms="after",
        query_key_norm=True,
        joint_query_key_norm=True,
        head_width=8,
        rope_scaling=Llama3(8.0, 1.0, 4.0, 64),
        rope_blocks=(True, False),
        attention_scale=0.3,
        residual_multiplier=0.5,
        logit_divisor=2.0,
        tied=False,
    ),
}


def adapters_of(params):
    """The adapters among parameters."""
    leaves = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({p: x for p, x in leaves.items() if "_lora_" in p[1]})


def random_like(config, rng):
    """Random parameters of a transformer, also where they start at 0 or 1."""
    tokens = jax.ShapeDtypeStruct((1, config.max_length), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]

    def draw(path, leaf):
        scale = 1.0 if path[-1].key == "embedding" else 1 / np.sqrt(leaf.shape[0])
        if path[-1].key == "scale":
            return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        return rng.normal(0, scale, leaf.shape).astype(np.float32)

    return jax.tree.map_with_path(draw, shapes)


def fields_of(c):
    """Fields of a config.json for a model of a family, as its author would publish it."""
    if c.family == "gpt2":
        return families.fields_of(c)
    rope = {"rope_type": "default"}
    if c.rope_scaling is not None:
        rope = dataclasses.asdict(c.rope_scaling)
        rope["rope_type"] = rope.pop("kind")
        if "original_length" in rope:
            rope["original_max_position_embeddings"] = rope.pop("original_length")
    return {
        "model_type": c.family,
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head,
        "max_position_embeddings": c.table,
        "rms_norm_eps": c.norm_epsilon,
        "rope_parameters": {**rope, "rope_theta": c.rope_base},
        "tie_word_embeddings": c.tied,
        "attention_bias": c.out_bias,
        "mlp_bias": c.mlp_bias,
        "sliding_window": c.window,
        "use_sliding_window": c.window is not None,
        "max_window_layers": 0,
    }


def save_model(directory, config, params, tokenizer=None, files=None):
    """Write a model as its author would publish it, with the files beside it in `files`."""
    beside = directory.with_name(f"{directory.name} files")
    beside.mkdir()
    for file in [] if files is None else files.iterdir():
        shutil.copyfile(file, beside / file.name)
    fields = fields_of(config)
    if tokenizer is not None:
        loaded = Tokenizer.load(tokenizer)
        fields |= {"bos_token_id": loaded.begin_id, "eos_token_id": loaded.end_id}
    (beside / "config.json").write_text(json.dumps(fields))
    weights.save(directory, config, params, tokenizer, beside)
    shutil.rmtree(beside)


def write_in_two(directory, tensors):
    """Write arrays as two files and their index."""
    names, places = sorted(tensors), {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        weights.write(directory / file, {name: tensors[name] for name in own})
        places |= dict.fromkeys(own, file)
    (directory / weights.INDEX).write_text(json.dumps({"weight_map": places}))
