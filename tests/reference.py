"""The oracle: Algorithms 1 and 2 as plain NumPy loops in float64, one gradient at a time."""

import numpy as np


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
