"""The language model and the users of the engine's benchmark.

The model has the shape of pfl's lm/configs/baseline.yaml: width 96, 8 heads, 3 layers,
inner width 1536, vocabulary 10,000, 20 tokens; users have 1 to 64 sentences of random tokens, 16 in
the median.
"""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HEADS, LAYERS, INNER, VOCABULARY, LENGTH = 96, 8, 3, 1536, 10_000, 20
USERS, MAX_SENTENCES = 400, 64
COHORT, LEARNING_RATE, CLIP, NOISE = 40, 0.1, 0.1, 0.1
MODEL_FLOATS = {"4 kB": 1_000, "6.4 MB": 1_600_000, "100 MB": 25_000_000}


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [sentences, LENGTH + 1], offsets int64 [USERS + 1])."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(16), 0.8, USERS), 1, MAX_SENTENCES).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = rng.integers(VOCABULARY, size=(offsets[-1], LENGTH + 1)).astype(np.int32)
    return tokens, offsets


def cohorts(rounds: int) -> np.ndarray:
    """Users of each round, int [rounds, COHORT]."""
    rng = np.random.default_rng(1)
    return np.stack([np.sort(rng.choice(USERS, COHORT, replace=False)) for _ in range(rounds)])


def initial() -> dict[str, np.ndarray]:
    """Parameters, float32: the embedding is tied to the output."""
    rng = np.random.default_rng(2)

    def normal(*shape):
        return (0.02 * rng.normal(size=shape)).astype(np.float32)

    params = {"embed": normal(VOCABULARY, WIDTH), "positions": normal(LENGTH, WIDTH)}
    for layer in range(LAYERS):
        params[f"qkv{layer}"] = normal(WIDTH, 3 * WIDTH)
        params[f"out{layer}"] = normal(WIDTH, WIDTH)
        params[f"up{layer}"] = normal(WIDTH, INNER)
        params[f"down{layer}"] = normal(INNER, WIDTH)
    return params


def losses(params, tokens):
    """Mean cross entropy of each sentence in JAX, [sentences]; tokens [sentences, LENGTH + 1]."""

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def heads(x):
        return x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)

    x = params["embed"][tokens[:, :-1]] + params["positions"][None]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
    for layer in range(LAYERS):
        q, k, v = (heads(y) for y in jnp.split(norm(x) @ params[f"qkv{layer}"], 3, axis=-1))
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) / np.float32(np.sqrt(WIDTH // HEADS))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhlm,bmhk->blhk", weights, v).reshape(x.shape)
        x = x + mixed @ params[f"out{layer}"]
        x = x + jax.nn.gelu(norm(x) @ params[f"up{layer}"]) @ params[f"down{layer}"]
    log_probs = jax.nn.log_softmax(norm(x) @ params["embed"].T)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0].mean(-1)
