"""The oracle: Algorithms 1 and 2 as plain NumPy loops in float64, one gradient at a time."""

import jax
import numpy as np


def floats(total, clip):
    """A sum in whole numbers as float64 gradients: its numbers times what 1 stands for."""
    unit = clip.unit(sum(np.size(leaf) for leaf in jax.tree.leaves(total)))
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64) * unit, total)


def rounding(total, clip, units):
    """How far such a sum may be from that of real numbers: half a unit for each contribution, and
    what a contribution is shortened by."""
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(total))
    bits = clip.sensitivity / clip.unit(size)
    return clip.unit(size) * units / 2 + units * clip.sensitivity * (size**0.5 / bits + 1e-4)


def clip(gradient, norm, normalised):
    """g min(1, C/|g|), or g min(1/C, 1/|g|)."""
    size = np.sqrt(sum(float(x) ** 2 for x in gradient.ravel()))
    factor = 1.0 if size <= norm else norm / size
    return gradient * factor / (norm if normalised else 1.0)


def els_gradient(theta, gradient_fn, batch, *, clip_norm, normalised, noise, expected_batch_size):
    """g^t of Algorithm 1 for a given batch S^t (example indices) and noise on the sum."""
    total = np.zeros_like(theta)
    for example in batch:
        total = total + clip(gradient_fn(theta, example), clip_norm, normalised)
    return (total + noise) / expected_batch_size


def uls_gradient(theta, gradient_fn, cohort, *, clip_norm, normalised, noise, expected_cohort_size):
    """g^t of Algorithm 2 for a given cohort: one list of example indices D_u^t per user."""
    total = np.zeros_like(theta)
    for group in cohort:
        if len(group):
            mean = sum(gradient_fn(theta, example) for example in group) / len(group)
            total = total + clip(mean, clip_norm, normalised)
    return (total + noise) / expected_cohort_size


def softmax_gradient(features, labels):
    """Gradient of softmax regression's cross entropy at one example: (softmax - onehot) x^T."""

    def gradient_fn(theta, example):
        scores = features[example] @ theta
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        probs[labels[example]] -= 1
        return np.outer(features[example], probs)

    return gradient_fn


def transformer_logits(params, tokens, num_heads):
    """Pre-norm decoder, one row and one position at a time: [rows, length] -> [..., vocabulary]."""
    embed, positions = _float64(params["embed"]["embedding"], params["positions"]["embedding"])
    logits = np.zeros((*np.shape(tokens), len(embed)))
    for row, ids in enumerate(tokens):
        x = np.array([embed[token] + positions[i] for i, token in enumerate(ids)])
        for block in range(sum(name.startswith("block_") for name in params)):
            x = _block(params[f"block_{block}"], x, num_heads)
        logits[row] = _layer_norm(params["final_norm"], x) @ embed.T
    return logits


def _block(params, x, num_heads):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [length, width]."""
    y = _layer_norm(params["attention_norm"], x)
    query, key, value = (_dense(params[name], y) for name in ("query", "key", "value"))
    size = x.shape[1] // num_heads
    heads = np.zeros_like(x)
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            scores = key[: i + 1, part] @ query[i, part] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            heads[i, part] = weights @ value[: i + 1, part] / weights.sum()
    x = x + _dense(params["out"], heads)
    y = _dense(params["up"], _layer_norm(params["mlp_norm"], x))
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))  # GELU
    return x + _dense(params["down"], y)


def _dense(params, x):
    kernel, bias = _float64(params["kernel"], params.get("bias", 0))
    return x @ kernel + bias


def _layer_norm(params, x):
    scale, bias = _float64(params["scale"], params["bias"])
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * scale + bias


def _float64(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]
