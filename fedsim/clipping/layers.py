"""What `bookkeeping` knows of layers: per-unit gradient norms and sums from inputs and cotangents.

A rule turns the calls of one module (its inputs and the cotangents of its outputs) into the units'
gradients of those parameters that are vectors, which are small, and into the squared norms and a
weighted sum of the units' gradients of a matrix, which are never formed all at once.

Shape suffixes: U units, T tokens of a unit (all its rows, of all calls), S the same as T, I inputs
and O outputs of a layer, D width, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedsim.clipping.clip import matmul
from fedsim.clipping.factors import Factors

CALL, ATTEND = METHODS = ("__call__", "attend")
EPS = float(jnp.finfo(jnp.float32).eps)
# Rounding where gradients are formed to take their norm, EPS^2 by itself: more, for the clipped sum
# adds up tokens in another order, and what cancels there must not be larger than what remains.
FORMED = 1e6 * EPS**2
# Beyond it, a square may overflow, and its partner in a product underflow unseen.
LARGEST = 1e15

# (squared norms, rounding): float32 [U] each. `rounding` is the scale of the error of `squared`
# that cancellation may leave: where `squared` is not far above it, the unit is not to be trusted.
Norms = tuple[jax.Array, jax.Array]


class Layer(ABC):
    """All calls of one module in a pass."""

    def __init__(self, module: nn.Module, calls: dict[str, list[tuple[jax.Array, jax.Array]]]):
        """Args: calls: by method, (input [U, T, ...], cotangent [U, T, O]) of every call."""
        self.module, self.calls = module, calls

    def vectors(self, params: Any) -> dict[str, jax.Array]:
        """Each unit's gradients of the parameters that are vectors, by name, float32 [U, O]."""
        return {}

    @abstractmethod
    def squared_norms(self, params: Any) -> Norms:
        """The squared norm of each unit's gradient of the matrix; zeros where there is none."""

    def factors(self) -> dict[str, Factors]:
        """Each unit's gradient of the matrix, by its name, as a product; empty without one."""
        return {}

    @abstractmethod
    def weighted_sum(self, params: Any, weights_U: jax.Array) -> dict[str, jax.Array]:
        """sum over units of weight times gradient of the matrix, float32, by its name."""

    def joined(self, method: str = CALL) -> tuple[jax.Array, jax.Array]:
        """Input and cotangent of all calls of a method: a layer that is called twice has seen
        twice the tokens. Raises KeyError: it was not called."""
        inputs, cotangents = zip(*self.calls[method], strict=True)
        return jnp.concatenate(inputs, axis=1), jnp.concatenate(cotangents, axis=1)


class Dense(Layer):
    """y = x W + b."""

    def vectors(self, params):
        return {"bias": token_sum(self.joined()[1])} if "bias" in params else {}

    def squared_norms(self, params):
        return product_norms(*self.joined())

    def factors(self):
        return {"kernel": Factors(self.joined())}

    def weighted_sum(self, params, weights_U):
        return {"kernel": product(*self.joined(), weights_U)}


class Embed(Layer):
    """Lookup of rows, and, where the embedding is tied, logits = x E^T: one gradient of both."""

    def squared_norms(self, params):
        if ATTEND not in self.calls:
            return lookup_norms(*self.looked_up())
        if CALL not in self.calls:
            return product_norms(*self.joined(ATTEND))
        return tied_norms(*self.joined(ATTEND), *self.looked_up())

    def factors(self):
        product, lookups = None, self.looked_up() if CALL in self.calls else None
        if ATTEND in self.calls:
            x_UTD, g_UTV = self.joined(ATTEND)
            product = g_UTV, x_UTD
        return {"embedding": Factors(product, lookups)}

    def weighted_sum(self, params, weights_U):
        total = jnp.zeros(params["embedding"].shape, jnp.float32)
        if ATTEND in self.calls:
            x_UTD, g_UTV = self.joined(ATTEND)
            total = product(g_UTV, x_UTD, weights_U)
        if CALL in self.calls:
            ids_US, h_USD = self.looked_up()
            total = total.at[ids_US].add(weighted(h_USD, weights_U))
        return {"embedding": total}

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

    def squared_norms(self, params):
        return jnp.zeros(()), jnp.zeros(())

    def weighted_sum(self, params, weights_U):
        return {}


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Dense: Dense,
    nn.Embed: Embed,
    nn.LayerNorm: Norm,
    nn.RMSNorm: Norm,
}


def product_norms(x_UTI: jax.Array, g_UTO: jax.Array) -> Norms:
    """|X^T G|^2 per unit, by the cheaper of forming X^T G and <X X^T, G G^T>."""
    if _gram_is_cheaper(x_UTI, g_UTO):
        x_UTS, g_UTS = (matmul(a, jnp.swapaxes(a, 1, 2)) for a in (x_UTI, g_UTO))
        x_U, g_U = (jnp.trace(a, axis1=1, axis2=2) for a in (x_UTS, g_UTS))
        rounding = jnp.where(jnp.maximum(x_U, g_U) < LARGEST, EPS * x_U * g_U, jnp.inf)
        return jnp.sum(x_UTS * g_UTS, axis=(1, 2)), rounding

    def one(unit):
        x_TI, g_TO = unit
        return jnp.sum(jnp.square(matmul(x_TI.T, g_TO)))

    rounding = FORMED * square_sum(x_UTI) * square_sum(g_UTO)
    return jax.lax.map(one, (x_UTI, g_UTO)), rounding


def lookup_norms(ids_UT: jax.Array, g_UTD: jax.Array) -> Norms:
    """|sum over tokens of onehot(id) g^T|^2 per unit: equal tokens' cotangents add up first."""

    def one(unit):
        ids_T, g_TD = unit
        first_T = jnp.argmax(ids_T[:, None] == ids_T[None, :], axis=1)
        return jnp.sum(jnp.square(jnp.zeros(g_TD.shape, jnp.float32).at[first_T].add(g_TD)))

    squared = jax.lax.map(one, (ids_UT, g_UTD.astype(jnp.float32)))
    return squared, FORMED * ids_UT.shape[1] * square_sum(g_UTD)


def tied_norms(x_UTD: jax.Array, g_UTV: jax.Array, ids_US: jax.Array, h_USD: jax.Array) -> Norms:
    """|G^T X + onehot(ids)^T H|^2 per unit: as logits' and as lookups' parameter."""
    if _gram_is_cheaper(x_UTD, g_UTV):
        parts = [
            product_norms(x_UTD, g_UTV),
            lookup_norms(ids_US, h_USD),
            _cross(x_UTD, g_UTV, ids_US, h_USD),
        ]
        squared, rounding = (sum(part) for part in zip(*parts, strict=True))
        return jnp.asarray(squared), jnp.asarray(rounding)

    def one(unit):
        x_TD, g_TV, ids_S, h_SD = unit
        return jnp.sum(jnp.square(matmul(g_TV.T, x_TD).at[ids_S].add(h_SD)))

    squared = jax.lax.map(one, (x_UTD, g_UTV, ids_US, h_USD.astype(jnp.float32)))
    return squared, FORMED * _tied_bound(x_UTD, g_UTV, h_USD)


def _cross(x_UTD, g_UTV, ids_US, h_USD) -> Norms:
    """2 <G^T X, onehot(ids)^T H> per unit = 2 sum over s, t of G[t, id_s] (x_t . h_s)."""
    picked_UTS = jnp.take_along_axis(g_UTV, ids_US[:, None, :], axis=2).astype(jnp.float32)
    dots_UTS = matmul(x_UTD, jnp.swapaxes(h_USD, 1, 2).astype(x_UTD.dtype))
    squared = 2 * jnp.sum(picked_UTS * dots_UTS, axis=(1, 2))
    return squared, EPS * _tied_bound(x_UTD, g_UTV, h_USD)


def _tied_bound(x_UTD, g_UTV, h_USD):
    return square_sum(x_UTD) * square_sum(g_UTV) + h_USD.shape[1] * square_sum(h_USD)


def product(x_UTI: jax.Array, g_UTO: jax.Array, weights_U: jax.Array) -> jax.Array:
    """sum over units of weight times (sum over tokens of x g^T), float32 [I, O]."""
    if x_UTI.shape[2] < g_UTO.shape[2]:  # the narrower one is sooner weighted
        x_UTI = weighted(x_UTI, weights_U)
    else:
        g_UTO = weighted(g_UTO, weights_U)
    x, g = (leaf.reshape(-1, leaf.shape[-1]).astype(jnp.float32) for leaf in (x_UTI, g_UTO))
    return matmul(x.T, g)


def weighted(g_UTO: jax.Array, weights_U: jax.Array) -> jax.Array:
    """Products in float32: what is added must have the norm that was computed, also in half
    precision."""
    return g_UTO.astype(jnp.float32) * weights_U[:, None, None]


def token_sum(g_UTO: jax.Array) -> jax.Array:
    """Sum over tokens, float32 [U, O]."""
    return jnp.sum(g_UTO.astype(jnp.float32), axis=1)


def _gram_is_cheaper(x_UTI, g_UTO) -> bool:
    tokens, inputs, outputs = x_UTI.shape[1], x_UTI.shape[2], g_UTO.shape[2]
    return tokens * (inputs + outputs) < inputs * outputs


def square_sum(x_UTI):
    return jnp.sum(jnp.square(x_UTI.astype(jnp.float32)), axis=(1, 2))
