"""Decoding: texts from a transformer, many at a time, with cached keys and values.

A batch has a fixed number of slots. Its prompts are read in one pass, and it ends with its longest
text. Which tokens a text has depends on its prompt, its key and, in the last bits of the logits, on
the texts that are given together; never on the time that anything takes.

Shape suffixes: B slots, V vocabulary, P length of a prompt.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.config import Sampling
from fedsim.errors import expect
from fedsim.models.transformer import Transformer, TransformerConfig

HALVINGS = 30
"""Of the interval with the least probability in the nucleus: to 1e-9 of the likeliest token's."""
MIN_WIDTH = 8
"""Least length to which prompts are padded."""


def key_of(seed: int) -> jax.Array:
    """The key of the draws of a seed. Raises: ConfigError: there is none of such a seed."""
    expect("seed", seed, -(2**63) <= seed < 2**63, "a number of 64 bits")
    return jax.random.key(seed)


def draw(logits_BV: jax.Array, keys_B: jax.Array, how: Sampling) -> jax.Array:
    """Draw a token for each text, int32 [B], from logits [B, V], each with its own key."""
    if how.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.float32)
    most_B1 = logits_BV.max(axis=-1, keepdims=True)
    # Relative to the likeliest token's.
    probs_BV = jnp.exp((logits_BV - most_B1) / how.temperature)
    if how.top_p < 1:
        probs_BV = jnp.where(probs_BV < _least_of_nucleus(probs_BV, how.top_p), 0, probs_BV)
    return jax.vmap(jax.random.categorical)(keys_B, jnp.log(probs_BV)).astype(jnp.int32)


def _least_of_nucleus(probs_BV: jax.Array, top_p: float) -> jax.Array:
    """The largest bound [B, 1] such that the tokens above it have a share `top_p` of the sum."""
    target_B1 = top_p * probs_BV.sum(axis=-1, keepdims=True)

    # By halving: sorting a vocabulary takes thirty times as long.
    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 + high_B1) / 2
        above_BV = jnp.where(probs_BV >= middle_B1, probs_BV, 0)
        enough_B1 = above_BV.sum(axis=-1, keepdims=True) >= target_B1
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    zero_B1 = jnp.zeros_like(target_B1)
    return jax.lax.fori_loop(0, HALVINGS, halve, (zero_B1, zero_B1 + 1))[0]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The beginning of a text, and what decides its continuation beside the model."""

    ids: Sequence[int]
    """Tokens, the begin token among them; at least one."""
    most: int
    """Most tokens to draw. >= 1."""
    number: int = 0
    """The keys of its draws have this number folded in."""


class Decoder:
    """A model with programs for a number of slots and a length."""

    def __init__(
        self, config: TransformerConfig, params: Any, how: Sampling, ends: Collection[int]
    ):
        """Hold a model.

        Args:
          config, params: the model.
          how: how tokens are drawn.
          ends: tokens that end a text.
        """
        self._config = dataclasses.replace(config, num_positions=config.table, remat=False)
        self._params = jax.device_put(params)
        self._how, self._ends = how, tuple(sorted(ends))

    def texts(
        self, prompts: Sequence[Prompt], key: jax.Array, *, slots: int, length: int
    ) -> list[list[int]]:
        """The tokens after each prompt; an end token is the last of a text.

        Args:
          key: of all draws. Token i of a text has the key folded with its number and with i.
          slots: number of texts at a time.
          length: positions of a slot; a prompt and the tokens drawn after it have at most as many.
        """
        config = dataclasses.replace(self._config, max_length=length)
        batches = [prompts[i : i + slots] for i in range(0, len(prompts), slots)]
        return [text for batch in batches for text in self._batch(config, batch, key, slots)]

    def _batch(
        self, config: TransformerConfig, prompts: Sequence[Prompt], key: jax.Array, slots: int
    ) -> list[list[int]]:
        unread = [prompt.ids[:-1] for prompt in prompts]  # the first step reads the last token
        longest = max(1, *map(len, unread))
        width = min(max(MIN_WIDTH, 1 << (longest - 1).bit_length()), config.max_length)
        before = np.zeros((slots, width), np.int32)
        state = {name: np.zeros(slots, np.int32) for name in ("token", "at", "most", "number")}
        for slot, prompt in enumerate(prompts):
            before[slot, : len(unread[slot])] = unread[slot]
            own = {"token": prompt.ids[-1], "at": len(unread[slot]), "most": prompt.most}
            for name, value in (own | {"number": prompt.number}).items():
                state[name][slot] = value
        state |= {"count": np.zeros(slots, np.int32), "running": state["most"] > 0}
        tokens = _decode(config, self._how, self._ends, self._params, before, key, state)
        return [own[own >= 0].tolist() for own in np.asarray(tokens)[: len(prompts)]]


def _apply(
    config: TransformerConfig, params: Any, cache: Any, tokens_BL: Any, at_B: Any
) -> tuple[Any, Any]:
    """(logits [B, L, V], the cache with these tokens). Args: cache: None: an empty one."""
    variables = {"params": params} | ({} if cache is None else {"cache": cache})
    logits, state = Transformer(config).apply(variables, tokens_BL, at_B, mutable=["cache"])
    return logits, state["cache"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(config, how, ends, params, before_BP, key, state):
    """Draw until all texts have ended: tokens [B, max_length], or -1."""
    # Keys and values of padding are replaced before attention reads them.
    cache = _apply(config, params, None, before_BP, jnp.zeros(len(before_BP), jnp.int32))[1]
    keys_B = jax.vmap(functools.partial(jax.random.fold_in, key))(state["number"])

    def draw_one(loop):
        step, cache, state, tokens = loop
        logits, cache = _apply(config, params, cache, state["token"][:, None], state["at"])
        keys = jax.vmap(jax.random.fold_in)(keys_B, state["count"])
        running, token = state["running"], draw(logits[:, 0], keys, how)
        tokens = tokens.at[:, step].set(jnp.where(running, token, -1))
        count = state["count"] + running
        ended = jnp.isin(token, jnp.array(ends, jnp.int32)) | (count >= state["most"])
        state = {
            **state,
            "token": jnp.where(running, token, state["token"]),
            "at": state["at"] + running,
            "count": count,
            "running": running & ~ended,
        }
        return step + 1, cache, state, tokens

    tokens = jnp.full((len(state["at"]), config.max_length), -1, jnp.int32)
    start = jnp.int32(0), cache, state, tokens
    return jax.lax.while_loop(lambda loop: loop[2]["running"].any(), draw_one, start)[3]
