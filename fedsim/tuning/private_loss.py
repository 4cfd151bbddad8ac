"""Loss on held-out users with noise: they are users, too.

Of each user the mean loss per token counts, cut to [0, L], L being the loss of guessing uniformly.
Their mean is released with Gaussian noise: around L / 2, one user moves the sum by L / 2 at most,
where a user without texts adds nothing (zero-out; the number of users is public).
"""

import math
from typing import Any

import jax
import numpy as np

from fedsim import accounting
from fedsim.accounting import SelectionEvent, StepEvent, calibration
from fedsim.noise import gaussian, release_shift

ROWS_AT_ONCE = 16
PER_UNIT = 2**20  # parts that L / 2 is made of: sums are of whole numbers


def user_losses(task: Any, params: Any, split: str) -> np.ndarray:
    """Mean loss of each user of a split in nats per token, float64 [users]."""
    store = getattr(task.dataset, split)
    frozen = () if task.frozen is None else (task.frozen,)
    compute = jax.jit(task.nats)
    nats, tokens = np.zeros(store.num_examples), np.zeros(store.num_examples)
    for low in range(0, store.num_examples, ROWS_AT_ONCE):
        rows = np.arange(low, min(low + ROWS_AT_ONCE, store.num_examples))
        padded = np.pad(rows, (0, ROWS_AT_ONCE - len(rows)), constant_values=-1)
        found = compute(params, task.read(split, padded), *frozen)
        nats[rows], tokens[rows] = (np.asarray(each, np.float64)[: len(rows)] for each in found)
    edges = store.offsets[:-1][np.diff(store.offsets) > 0]
    return np.add.reduceat(nats, edges) / np.maximum(1, np.add.reduceat(tokens, edges))


def noisy_mean_loss(
    losses: np.ndarray, *, noise_multiplier: float, most: float, rng: np.random.Generator
) -> float:
    """The mean of users' losses [users], each cut to [0, most], with noise.

    Guarantees: the Gaussian mechanism with this multiplier, on a lattice, whatever a user's loss
      is; what is not finite counts as `most`.
    """
    cut = np.clip(np.nan_to_num(losses, nan=most, posinf=most, neginf=0.0), 0.0, most)
    total = int(np.rint((2 * cut / most - 1) * PER_UNIT).astype(np.int64).sum())
    stddev = noise_multiplier * PER_UNIT
    cell = 2 ** release_shift(stddev)
    noisy = total + round(float(gaussian(rng, np.empty(1))[0]) * stddev)
    released = round(noisy / cell) * cell / PER_UNIT
    return most / 2 * (1 + released / len(losses))


def largest_loss(vocab_size: int) -> float:
    """L: the loss of guessing uniformly, in nats per token."""
    return math.log(vocab_size)


def calibrate_evaluation(epsilon: float, delta: float, mean: float, shape: float) -> float:
    """The noise multiplier of one evaluation in a private selection whose evaluations cost the
    held-out users epsilon, all together; with mean = 1, of one evaluation alone."""

    def spend(sigma: float, accuracy: float) -> float:
        event = SelectionEvent((((StepEvent(sigma, 1.0), 1),),), mean, shape)
        return accounting.epsilon([(event, 1)], delta)

    return calibration.calibrate("noise_multiplier", spend, epsilon, 5.0, (1e5, 0.1), None)
