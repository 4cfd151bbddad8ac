"""Decoding: texts from a transformer, many at a time, with cached keys and values.

A batch has a fixed number of slots. A text that ends leaves its slot to the next one, whose prompt
is read in one pass (continuous batching), so that slots are idle only at the end. Which tokens a
text has depends on its prompt, its key and, in the last bits of the logits, on the texts that are
given together; never on the time that anything takes.

Shape suffixes: B slots, V vocabulary, P length of a prompt, R prompts of a pass.
"""

import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.config import Sampling
from fedsim.errors import expect
from fedsim.models.transformer import Transformer, TransformerConfig

HALVINGS = 30
"""Of the interval with the least probability in the nucleus: to 1e-9 of the likeliest token's."""
MAX_STEPS = 64
"""Tokens of a text that a call of a program draws, unless slots are to be filled before."""
PROMPTS, MIN_WIDTH = 8, 8
"""Prompts that are read in one pass, and the least length to which they are padded."""


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
    if 0 < how.top_k < probs_BV.shape[-1]:
        least_B1 = jax.lax.top_k(probs_BV, how.top_k)[0][:, -1:]
        probs_BV = jnp.where(probs_BV < least_B1, 0, probs_BV)
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
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (index of a prompt, tokens after it) as texts end; an end token is their last.

        Args:
          key: of all draws. Token i of a text has the key folded with its number and with i.
          slots: number of texts at a time.
          length: positions of a slot; a prompt and the tokens drawn after it have at most as many.
        """
        config = dataclasses.replace(self._config, max_length=length)
        cache = _empty_cache(config, self._params, slots)
        state = {name: np.zeros(slots, np.int32) for name in ("token", "at", "count", "most")}
        state |= {"number": np.zeros(slots, np.int32), "running": np.zeros(slots, bool)}
        waiting, owners = deque(enumerate(prompts)), np.full(slots, -1)
        drawn: dict[int, list[int]] = defaultdict(list)
        unread = any(len(prompt.ids) > 1 for prompt in prompts)
        # A pass over prompts reads all parameters, as a step does: slots wait for each other.
        patience = max(1, slots // 8) if unread else 1
        while True:
            new: dict[int, Prompt] = {}
            for slot in np.flatnonzero(owners < 0)[: len(waiting)].tolist():
                owners[slot], new[slot] = waiting.popleft()
                _fill(state, slot, new[slot])
            cache = self._read(config, cache, new, slots)
            if not state["running"].any():
                return
            least = slots - patience if waiting else 0
            tokens, cache, state = _decode(
                *(config, self._how, self._ends, self._params, cache, key, state, least)
            )
            tokens, state = np.asarray(tokens), jax.tree.map(np.array, state)
            for slot in np.flatnonzero(owners >= 0).tolist():
                index, own = int(owners[slot]), tokens[slot]
                drawn[index] += own[own >= 0].tolist()
                if not state["running"][slot]:
                    yield index, drawn.pop(index)
                    owners[slot] = -1

    def _read(
        self, config: TransformerConfig, cache: Any, new: Mapping[int, Prompt], slots: int
    ) -> Any:
        """Add all tokens of new prompts but the last, which the first step reads, to the cache."""
        unread = [(slot, prompt.ids[:-1]) for slot, prompt in new.items() if len(prompt.ids) > 1]
        for group in (unread[i : i + PROMPTS] for i in range(0, len(unread), PROMPTS)):
            longest = max(len(ids) for _, ids in group)
            width = min(max(MIN_WIDTH, 1 << (longest - 1).bit_length()), config.max_length)
            tokens = np.zeros((PROMPTS, width), np.int32)
            into = np.full(PROMPTS, slots, np.int32)  # beyond the last slot: dropped
            for row, (slot, ids) in enumerate(group):
                tokens[row, : len(ids)], into[row] = ids, slot
            cache = _read_prompts(config, self._params, cache, tokens, into)
        return cache


def _fill(state: Mapping[str, np.ndarray], slot: int, prompt: Prompt) -> None:
    """Put a prompt into a slot of the state."""
    own = {"token": prompt.ids[-1], "at": len(prompt.ids) - 1, "count": 0, "most": prompt.most}
    for name, value in (own | {"number": prompt.number, "running": True}).items():
        state[name][slot] = value


def _apply(
    config: TransformerConfig, params: Any, cache: Any, tokens_BL: Any, at_B: Any
) -> tuple[Any, Any]:
    """(logits [B, L, V], the cache with these tokens). Args: cache: None: an empty one."""
    variables = {"params": params} | ({} if cache is None else {"cache": cache})
    logits, state = Transformer(config).apply(variables, tokens_BL, at_B, mutable=["cache"])
    return logits, state["cache"]


def _empty_cache(config: TransformerConfig, params: Any, slots: int) -> Any:
    first = jax.ShapeDtypeStruct((slots, 1), jnp.int32), jax.ShapeDtypeStruct((slots,), jnp.int32)
    apply = functools.partial(_apply, config)
    _, cache = jax.eval_shape(lambda *inputs: apply(inputs[0], None, *inputs[1:]), params, *first)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_prompts(config, params, cache, tokens_RP, into_R):
    """Write the keys and values of prompts into their slots."""
    # Those of padding are replaced before attention reads them.
    short = dataclasses.replace(config, max_length=tokens_RP.shape[1])
    _, new = _apply(short, params, None, tokens_RP, jnp.zeros(len(tokens_RP), jnp.int32))
    width = tokens_RP.shape[1]

    def put(old, leaf):
        return old.at[into_R, :, :width].set(leaf, mode="drop")

    return jax.tree.map(put, cache, new)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(config, how, ends, params, cache, key, state, least):
    """Draw until no more than `least` texts go on: (tokens [B, MAX_STEPS] or -1, cache, state)."""
    keys_B = jax.vmap(functools.partial(jax.random.fold_in, key))(state["number"])

    def goes_on(loop):
        step, _, state, _ = loop
        return (step < MAX_STEPS) & (state["running"].sum() > least)

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

    tokens = jnp.full((len(state["at"]), MAX_STEPS), -1, jnp.int32)
    loop = jax.lax.while_loop(goes_on, draw_one, (jnp.int32(0), cache, state, tokens))
    return loop[3], loop[1], loop[2]
