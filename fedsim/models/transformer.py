"""A decoder-only transformer; its loss is in language_model.py.

One plain `flax.linen` model in the shapes of the paper's 350 M parameters (pre-norm blocks, learned
positions, GELU, tied embedding) and of the widespread open families, whose parts are options of
`TransformerConfig`. All options are functions without parameters around the same layers, which
every strategy of clipping knows. Rows are independent: no dropout, no batch statistics, no routing,
nothing that would couple users inside the loss.

Shape suffixes: B rows, L positions, D width, H heads, K head width, S keys, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedsim.clipping import layers_are_recorded
from fedsim.errors import expect
from fedsim.models import attention, frozen, rope
from fedsim.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021): y = x W + scale x A B."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Names of DENSE: layers that have adapters, in every block."""
    rslora: bool = False
    """True: the scale is alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank."""
    frozen: str = dataclasses.field(default="float32", compare=False)
    """Type of the matrices beneath. It does not change what is computed, only its rounding."""

    @property
    def scale(self) -> float:
        """Factor of what an adapter adds."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


DENSE = ("query", "key", "value", "out", "gate", "up", "down")
BLOCKS = "blocks"  # name of the stacked parameters of all layers, leaves [layers, ...]
LORA_A = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Initial A of an adapter, as in the reference implementation: uniform in +-1/sqrt(inputs)."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and parts of a model. The defaults are those of the paper's models.

    Options that differ between blocks are tuples with a value for each block; `of_block` has those
    of one block.
    """

    vocab_size: int
    max_length: int
    width: int
    num_layers: int
    num_heads: int
    dtype: str | None = None
    """Type of the computation; None: the parameters' own, which is float32."""
    num_kv_heads: int | None = None
    """Heads of keys and values, shared by groups of queries' heads. None: num_heads."""
    head_width: int | None = None
    """None: width / num_heads."""
    mlp_width: int | None = None
    """None: four times the width."""
    num_positions: int | None = None
    """Length of the longest sequence of the model: rows of the table of learned positions. None:
    max_length."""
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: float = 1e-6
    norms: Literal["before", "after", "both"] = "before"
    """Where the norms of attention and MLP are: before each, after it (inside the residual), or
    both."""
    query_key_norm: bool = False
    """An RMS norm of every head's query and key."""
    joint_query_key_norm: bool = False
    """True: that norm is one of all heads together."""
    positions: Literal["learned", "rope", "none"] = "learned"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_blocks: tuple[bool, ...] | None = None
    """Blocks with rotary positions; the others have none. None: all blocks."""
    window: int | None = None
    """Number of positions that a position attends to, itself included. None: all before it."""
    window_blocks: tuple[bool, ...] | None = None
    """Blocks whose attention has the window. None: all blocks."""
    window_rope_base: float | None = None
    """rope_base of blocks with the window, without scaling. None: as in the other blocks."""
    attention_scale: float | None = None
    """Factor of the products of queries and keys. None: 1 / sqrt(width of a head)."""
    attention_cap: float | None = None
    """Soft cap of those products: cap tanh(x / cap). None: no cap."""
    mlp: Literal["gelu", "swiglu", "geglu"] = "gelu"
    query_bias: bool = False
    """True if queries, keys and values have biases."""
    out_bias: bool = False
    mlp_bias: bool = True
    tied: bool = True
    """True if the embedding is also the output layer."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings that are looked up."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add to the residual."""
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    """Soft cap of the logits, after the division. None: no cap."""
    family: str = dataclasses.field(default="gpt2", compare=False)
    """Family of Hugging Face models whose names its files have. It changes nothing of the
    computation."""
    remat: bool = False
    """Compute each block again in the backward pass: less memory, more time, equal values."""
    lora: Lora | None = None

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // self.num_heads

    @property
    def hidden(self) -> int:
        """Width inside the MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def table(self) -> int:
        """The longest sequence the model is made for."""
        return self.num_positions or self.max_length

    def of_block(self, i: int) -> "TransformerConfig":
        """The config of block i, in which all blocks are alike."""
        own: dict[str, Any] = dict.fromkeys(("rope_blocks", "window_blocks", "window_rope_base"))
        if self.window is None or not (self.window_blocks is None or self.window_blocks[i]):
            own["window"] = None
        elif self.window_rope_base is not None:
            own |= {"rope_base": self.window_rope_base, "rope_scaling": None}
        if self.rope_blocks is not None and not self.rope_blocks[i]:
            own["positions"] = "none"
        return dataclasses.replace(self, **own)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "TransformerConfig":
        """Make a config from the result of `dataclasses.asdict`, also from JSON."""
        own = dict(fields)
        for name in ("rope_blocks", "window_blocks"):
            own[name] = own.get(name) and tuple(own[name])
        if own["rope_scaling"]:
            scaling = dict(own["rope_scaling"])
            own["rope_scaling"] = rope.SCALINGS[scaling.pop("kind")](**scaling)
        if own["lora"]:
            own["lora"] = Lora(**{**own["lora"], "layers": tuple(own["lora"]["layers"])})
        return cls(**own)


# width, layers, heads. `paper` has the paper's 350 M parameters with a 30,522-piece WordPiece
# vocabulary: 24 blocks of 12 * 1024^2 weights and a tied embedding. `large` has a billion.
PRESETS = {
    "micro": (16, 1, 2),
    "tiny": (64, 2, 4),
    "small": (128, 4, 4),
    "medium": (256, 6, 8),
    "paper": (1024, 24, 16),
    "large": (2048, 20, 16),
}


def preset(name: str, vocab_size: int, max_length: int) -> TransformerConfig:
    """Config of the preset `name`. Raises: ConfigError: there is none of that name."""
    expect("model", name, name in PRESETS, "one of " + ", ".join(PRESETS))
    return TransformerConfig(vocab_size, max_length, *PRESETS[name])


def _norm(c: TransformerConfig, name: str) -> nn.Module:
    kind = nn.LayerNorm if c.norm == "layer" else nn.RMSNorm
    return kind(epsilon=c.norm_epsilon, dtype=c.dtype, name=name)


def _dense(c: TransformerConfig, name: str, x_BLD: jax.Array, width: int, bias: bool) -> jax.Array:
    """x W (+ b), and the adapter's x A B where the layer has one."""
    y = _kinds(c).Dense(width, use_bias=bias, dtype=c.dtype, name=name)(x_BLD)
    if c.lora is None or name not in c.lora.layers:
        return y
    own = {"use_bias": False, "dtype": c.dtype}
    # B starts at zero.
    x_BLR = nn.Dense(c.lora.rank, kernel_init=LORA_A, name=f"{name}_lora_a", **own)(x_BLD)
    added = nn.Dense(width, kernel_init=nn.initializers.zeros, name=f"{name}_lora_b", **own)(x_BLR)
    return y + c.lora.scale * added


def _kinds(c: TransformerConfig) -> Any:
    """Module with the layers of the model itself: beneath adapters they are frozen."""
    return nn if c.lora is None else frozen


ACTIVATIONS = {"swiglu": nn.silu, "geglu": nn.gelu}
"""Of the gate of a gated MLP."""


class Block(nn.Module):
    """Attention and MLP, each with norms and a residual around it. All blocks of its config are
    alike."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        start: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
    ) -> jax.Array:
        x_BLD = self._added("attention", x_BLD, lambda x: self._attention(x, start, positions_BL))
        return self._added("mlp", x_BLD, self._mlp)

    @nn.nowrap
    def _added(self, name: str, x_BLD: jax.Array, part: Callable[[jax.Array], jax.Array]):
        """Add a part of the block to the residual, between its norms."""
        c = self.config
        y_BLD = part(x_BLD if c.norms == "after" else _norm(c, f"{name}_norm")(x_BLD))
        if c.norms != "before":
            y_BLD = _norm(c, f"{name}_post_norm")(y_BLD)
        return x_BLD + c.residual_multiplier * y_BLD

    @nn.nowrap
    def _attention(
        self, x_BLD: jax.Array, start: jax.Array | None, positions_BL: jax.Array | None
    ) -> jax.Array:
        c = self.config
        q_BLHK, k_BLHK, v_BLHK = (
            self._heads(name, heads, x_BLD)
            for name, heads in (("query", c.num_heads), ("key", c.kv_heads), ("value", c.kv_heads))
        )
        if c.positions == "rope":
            at = _positions(x_BLD.shape[1], start) if positions_BL is None else positions_BL
            q_BLHK, k_BLHK = (
                rope.rotate(x, at, c.rope_base, c.rope_scaling) for x in (q_BLHK, k_BLHK)
            )
        scores = {"scale": c.attention_scale, "cap": c.attention_cap}
        attend = functools.partial(attention.attend, window=c.window, **scores)
        if positions_BL is not None:
            own = attention.own_text(positions_BL, c.window)
            y_BLHK = attend(q_BLHK, k_BLHK, v_BLHK, own)
        elif start is None:
            if c.remat and layers_are_recorded():  # then the block around it is none of nn.remat
                attend = jax.checkpoint(attend)
            y_BLHK = attend(q_BLHK, k_BLHK, v_BLHK)
        else:
            k_BHSK = self._remember("key_cache", k_BLHK, start)
            v_BHSK = self._remember("value_cache", v_BLHK, start)
            seen = attention.seen(_positions(x_BLD.shape[1], start), c.max_length, c.window)
            y_BLHK = attention.attend_cached(q_BLHK, k_BHSK, v_BHSK, seen, **scores)
        y_BLD = y_BLHK.reshape(*x_BLD.shape[:2], c.num_heads * c.head)
        return _dense(c, "out", y_BLD, c.width, c.out_bias)

    @nn.nowrap
    def _heads(self, name: str, heads: int, x_BLD: jax.Array) -> jax.Array:
        """Queries, keys or values, [B, L, H, K]."""
        c = self.config
        y = _dense(c, name, x_BLD, heads * c.head, c.query_bias)
        y = y if c.joint_query_key_norm else y.reshape(*x_BLD.shape[:2], heads, c.head)
        if c.query_key_norm and name != "value":
            y = nn.RMSNorm(name=f"{name}_norm", epsilon=c.norm_epsilon, dtype=c.dtype)(y)
        return y.reshape(*x_BLD.shape[:2], heads, c.head)

    @nn.nowrap
    def _mlp(self, x_BLD: jax.Array) -> jax.Array:
        c = self.config
        if c.mlp == "gelu":
            y_BLD = nn.gelu(_dense(c, "up", x_BLD, c.hidden, c.mlp_bias))
        else:
            gate_BLD = ACTIVATIONS[c.mlp](_dense(c, "gate", x_BLD, c.hidden, c.mlp_bias))
            y_BLD = gate_BLD * _dense(c, "up", x_BLD, c.hidden, c.mlp_bias)
        return _dense(c, "down", y_BLD, c.width, c.mlp_bias)

    @nn.nowrap
    def _remember(self, name: str, new_BLHK: jax.Array, start: jax.Array) -> jax.Array:
        """Add keys or values from `start` of each row on to the cache; all of it [B, H, S, K]."""
        rows, _, heads, width = new_BLHK.shape
        shape = (rows, heads, self.config.max_length, width)
        cache = self.variable("cache", name, jnp.zeros, shape, new_BLHK.dtype)
        put = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (0, at, 0)))
        new_BHLK = new_BLHK.transpose(0, 2, 1, 3)
        cache.value = put(cache.value, new_BHLK, jnp.broadcast_to(start, rows))
        return cache.value


def _positions(length: int, start: jax.Array | None) -> jax.Array:
    """Positions start ... start + length - 1, int [B or 1, L]. `start` defaults to 0."""
    return jnp.reshape(0 if start is None else start, (-1, 1)) + jnp.arange(length)[None]


def stacked(params: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Parameters with the trees of all blocks as one tree of NumPy arrays [layers, ...].

    A transformer with such parameters compiles a block once, and loops over the layers.
    """
    names = [f"block_{i}" for i in range(num_layers)]
    rest = {name: leaf for name, leaf in params.items() if name not in names}
    blocks = (params[name] for name in names)
    return {**rest, BLOCKS: jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


def unstacked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with a tree for each block. Args: params: `stacked` or not."""
    rest = {name: leaf for name, leaf in params.items() if name != BLOCKS}
    blocks = params.get(BLOCKS, {})
    count = len(jax.tree.leaves(blocks)[0]) if blocks else 0
    numbered = ((i, jax.tree.map(lambda leaf: leaf[i], blocks)) for i in range(count))  # noqa: B023
    return {**rest, **{f"block_{i}": block for i, block in numbered}}


def _in_turn(
    block: type[nn.Module], c: TransformerConfig, x_BLD: jax.Array, stacked: Any, *positions: Any
) -> jax.Array:
    configs = [c.of_block(i) for i in range(c.num_layers)]
    kinds = list(dict.fromkeys(configs))

    def of_kind(kind: TransformerConfig) -> Callable[..., Any]:
        own = block(kind, parent=None)
        return lambda x_BLD, params: own.apply({"params": params}, x_BLD, *positions)

    def through(x_BLD, layer) -> tuple[Any, None]:
        kind, params = layer
        return jax.lax.switch(kind, branches, x_BLD, params), None

    branches = [of_kind(kind) for kind in kinds]
    which = jnp.array([kinds.index(own) for own in configs])
    return jax.lax.scan(through, x_BLD, (which, stacked))[0]


class Transformer(nn.Module):
    """Tokens int [B, L] to logits [B, L, V], or, without its head, to what `head_logits` takes.
    Parameters may be `stacked`.

    With `start`, int [] or [B], the tokens of a row begin at that position. The keys and values of
    all tokens before are in the collection `cache`, to which those of these tokens are added. With
    `positions_BL`, a row has several texts: the position of each token in its text, which alone it
    attends to.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        start: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
        *,
        head: bool = True,
    ) -> jax.Array:
        c = self.config
        embed = _embed(c, "embed", c.vocab_size)
        x_BLD = c.embedding_multiplier * embed(tokens_BL)
        if c.positions == "learned":
            at = _positions(tokens_BL.shape[1], start) if positions_BL is None else positions_BL
            at = jnp.broadcast_to(at, tokens_BL.shape)
            x_BLD = x_BLD + _embed(c, "positions", c.table)(at)
        remat = c.remat and start is None and not layers_are_recorded()
        block: Any = nn.remat(Block) if remat else Block  # blocks have names of their own
        if (stacked := self.get_variable("params", BLOCKS)) is not None:
            x_BLD = _in_turn(block, c, x_BLD, stacked, start, positions_BL)
        else:
            for i in range(c.num_layers):
                x_BLD = block(c.of_block(i), name=f"block_{i}")(x_BLD, start, positions_BL)
        x_BLD = _norm(c, "final_norm")(x_BLD)
        if not head:
            return x_BLD
        return _capped(c, embed.attend(x_BLD) if c.tied else _head(c)(x_BLD))


INITIAL = nn.initializers.normal(0.02)
"""Of embeddings and of an untied head."""


def _embed(c: TransformerConfig, name: str, rows: int) -> nn.Embed:
    return _kinds(c).Embed(rows, c.width, embedding_init=INITIAL, dtype=c.dtype, name=name)


def _head(c: TransformerConfig) -> nn.Dense:
    own = {"kernel_init": INITIAL, "dtype": c.dtype, "name": "head"}
    return _kinds(c).Dense(c.vocab_size, use_bias=False, **own)


def _capped(c: TransformerConfig, logits: jax.Array) -> jax.Array:
    return attention.soft_cap(c.logit_cap, logits / c.logit_divisor)


def head_logits(c: TransformerConfig, params: Any, x: jax.Array) -> jax.Array:
    """Logits [..., V] of what a `Transformer` without its head returns, [..., D]."""
    if c.tied:
        embed = _embed(c, "embed", c.vocab_size)
        logits: Any = embed.apply({"params": params["embed"]}, x, method="attend")
    else:
        logits = _head(c).apply({"params": params["head"]}, x)
    return _capped(c, logits)
