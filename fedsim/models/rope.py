"""Rotary positions (Su et al. 2021), and scalings of them for texts longer than the first ones.

A scaling divides the frequencies of a trained model, by the method that `transformers` calls
`kind`. `dynamic` is none of them: up to the longest text of its model it scales nothing, and longer
texts are refused.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
    """All frequencies divided by one factor (Chen et al. 2023)."""

    factor: float
    kind: str = dataclasses.field(default="linear", init=False)

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
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

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Scale frequencies, float64 [pairs]."""
        turns = self.original_length * frequencies / (2 * math.pi)  # within the original length
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): low frequencies divided, and sharper attention."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_length: int
    kind: str = dataclasses.field(default="yarn", init=False)

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Scale frequencies, float64 [pairs]."""
        width = 2 * len(frequencies)

        def pair_with(turns: float) -> float:  # the pair that turns so often in the length
            return width * math.log(self.original_length / turns / math.tau) / math.log(base) / 2

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        divided = (np.arange(len(frequencies)) - first) / ((last - first) or 0.001)
        divided = np.clip(divided, 0, 1)
        return frequencies * (1 - divided + divided / self.factor)


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024), for texts up to the original length: a factor for each pair.

    Longer texts would have other factors, and the same text another meaning beside them.
    """

    short_factor: tuple[float, ...]
    attention_factor: float
    original_length: int
    kind: str = dataclasses.field(default="longrope", init=False)

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Scale frequencies, float64 [pairs]."""
        return frequencies / np.array(self.short_factor)


RopeScaling = Linear | Llama3 | Yarn | LongRope
SCALINGS: dict[str, Any] = {each.kind: each for each in (Linear, Llama3, Yarn, LongRope)}


def scaling_from_dict(fields: Mapping[str, Any]) -> RopeScaling:
    """Make a scaling from its fields as JSON."""
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return SCALINGS[fields["kind"]](**{name: x for name, x in values.items() if name != "kind"})


def frequencies(width: int, base: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each pair of `width` features, float32 [width / 2]."""
    plain = base ** (-np.arange(0, width, 2) / width)
    return (plain if scaling is None else scaling.scaled(plain, base)).astype(np.float32)


def rotate(
    x_BLHK: jax.Array, positions_BL: jax.Array, frequencies: np.ndarray, factor: float = 1.0
) -> jax.Array:
    """Apply rotary positions. Pairs feature i with i + R/2 of the first R, as Hugging Face does.

    Args:
      x_BLHK: queries or keys.
      positions_BL: int [B, L] or [1, L].
      frequencies: of R/2 pairs; the other features of a head stay as they are.
      factor: multiplies the rotated features.
    """
    rotary = 2 * len(frequencies)
    angles_BLR = positions_BL[:, :, None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jnp.cos(angles_BLR)[:, :, None], jnp.sin(angles_BLR)[:, :, None]
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x_BLHK[..., :rotary].astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rotary < x_BLHK.shape[-1]:
        turned.append(x_BLHK[..., rotary:].astype(jnp.float32))
    return jnp.concatenate(turned, axis=-1).astype(x_BLHK.dtype)
