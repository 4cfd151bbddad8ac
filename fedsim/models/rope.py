"""Rotary positions (Su et al. 2021), and scalings of them for texts longer than the first ones.

A scaling divides the frequencies of a trained model, by the method that `transformers` calls
`kind`. `dynamic` is none of them: up to the longest text of its model it scales nothing, and longer
texts are refused.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
    """All frequencies divided by one factor (Chen et al. 2023)."""

    factor: float
    kind: str = dataclasses.field(default="linear", init=False)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale frequencies, float64 [pairs]."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by a factor, high ones kept, as in Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    kind: str = dataclasses.field(default="llama3", init=False)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale frequencies, float64 [pairs]."""
        turns = self.original_length * frequencies / (2 * math.pi)  # within the original length
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


RopeScaling = Linear | Llama3
SCALINGS: dict[str, Any] = {each.kind: each for each in (Linear, Llama3)}


def frequencies(width: int, base: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each pair of `width` features, float32 [width / 2]."""
    plain = base ** (-np.arange(0, width, 2) / width)
    return (plain if scaling is None else scaling.scaled(plain)).astype(np.float32)


def rotate(
    x_BLHK: jax.Array, positions_BL: jax.Array, base: float, scaling: RopeScaling | None
) -> jax.Array:
    """Apply rotary positions, int [B or 1, L], to queries or keys.

    Pairs feature i with i + K/2, as Hugging Face does.
    """
    of_pairs = frequencies(x_BLHK.shape[-1], base, scaling)
    angles_BLR = positions_BL[:, :, None].astype(jnp.float32) * of_pairs[None, None]
    cos, sin = jnp.cos(angles_BLR)[:, :, None], jnp.sin(angles_BLR)[:, :, None]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BLHK.dtype)
