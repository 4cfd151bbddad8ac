"""What `ghost` knows of layers: per-unit gradients from their inputs and output cotangents.

A rule turns the calls of one module (its inputs and the cotangents of its outputs) into the units'
gradients of those parameters that are vectors, which are small, and into those of a matrix as
products, which are not formed here.

Shape suffixes: U units, T tokens of a unit (all its rows, of all calls), I inputs and O outputs of
a layer, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedsim.clipping.factors import Factors

CALL, ATTEND = METHODS = ("__call__", "attend")


class Layer:
    """All calls of one module in a pass."""

    def __init__(self, module: nn.Module, calls: dict[str, list[tuple[jax.Array, jax.Array]]]):
        """Args: calls: by method, (input [U, T, ...], cotangent [U, T, O]) of every call."""
        self.module, self.calls = module, calls

    def vectors(self, params: Any) -> dict[str, jax.Array]:
        """Each unit's gradients of the parameters that are vectors, by name, float32 [U, O]."""
        return {}

    def factors(self) -> dict[str, Factors]:
        """Each unit's gradient of the matrix, by its name, as a product; empty without one."""
        return {}

    def joined(self, method: str = CALL) -> tuple[jax.Array, jax.Array]:
        """Input and cotangent of all calls of a method: a layer that is called twice has seen
        twice the tokens. Raises KeyError: it was not called."""
        inputs, cotangents = zip(*self.calls[method], strict=True)
        return jnp.concatenate(inputs, axis=1), jnp.concatenate(cotangents, axis=1)


class Dense(Layer):
    """y = x W + b."""

    def vectors(self, params):
        return (
            {"bias": jnp.sum(self.joined()[1].astype(jnp.float32), axis=1)}
            if "bias" in params
            else {}
        )

    def factors(self):
        return {"kernel": Factors(self.joined())}


class Embed(Layer):
    """Lookup of rows, and, where the embedding is tied, logits = x E^T: one gradient of both."""

    def factors(self):
        product, lookups = None, self.looked_up() if CALL in self.calls else None
        if ATTEND in self.calls:
            x_UTD, g_UTV = self.joined(ATTEND)
            product = g_UTV, x_UTD
        return {"embedding": Factors(product, lookups)}

    def looked_up(self) -> tuple[jax.Array, jax.Array]:
        """Ids and cotangents of all lookups; ids that count from the end become ordinary ones."""
        ids_UT1, h_UTD = self.joined()
        ids_UT = ids_UT1[..., 0]
        return jnp.where(ids_UT < 0, ids_UT + self.module.num_embeddings, ids_UT), h_UTD


class Norm(Layer):
    """y = scale * z + bias, z the normalised input."""

    def _bare(self) -> nn.Module:
        """The normalisation alone."""
        bare = {"use_scale": False, "use_bias": False, "dtype": jnp.float32}
        fields = {name: value for name, value in bare.items() if hasattr(self.module, name)}
        return self.module.clone(parent=None, name=None, **fields)

    def vectors(self, params):
        x_UTD, g_UTD = self.joined()
        z_UTD, g_UTD = jnp.asarray(self._bare().apply({}, x_UTD)), g_UTD.astype(jnp.float32)
        sums = {"scale": jnp.sum(z_UTD * g_UTD, axis=1), "bias": jnp.sum(g_UTD, axis=1)}
        return {name: sums[name] for name in params}


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Dense: Dense,
    nn.Embed: Embed,
    nn.LayerNorm: Norm,
    nn.RMSNorm: Norm,
}
