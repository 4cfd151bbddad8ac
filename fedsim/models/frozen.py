"""Frozen weights in few bytes: bfloat16, as many checkpoints are stored, or int8.

Only the matrices of a model beneath adapters are kept so; its vectors (norms and biases) are
float32. An int8 matrix has a float32 scale for each output channel: a column of a kernel, or a row
of an embedding, which is an output of a tied head. A bfloat16 matrix is kept as its bits, uint16,
because XLA on CPUs makes float32 of a bfloat16 array before it takes a part of it. Weights are
converted inside each product, again in the backward pass, so that no float32 copy of the model
exists, if its layers are `stacked`: one after another, XLA on CPUs converts all of them first.

The bound on a contribution stays: its proof takes any float32 gradient of the adapters, whatever
the model computes, and frozen weights are the same for all units.

Shape suffixes: I inputs and O outputs of a layer, V vocabulary, D width.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, traverse_util

INPUTS, OUTPUTS = 0, 1  # contracted axis of a weight: of a kernel [I, O], of an embedding [V, D]
CONTRACTED = {"kernel": INPUTS, "embedding": OUTPUTS}
"""The matrices of layers, by name."""
SCALE = "int8_scale"
LARGEST = 127
BFLOAT16 = np.dtype(jnp.bfloat16)


def as_frozen(params: Mapping[str, Any], dtype: str) -> Any:
    """Convert a model's matrices to the type of frozen weights.

    Args:
      params: nested dicts of NumPy arrays, not stacked.
      dtype: stored (as they are), float32, bfloat16 or int8.
    """
    leaves: dict[Any, Any] = {}
    for path, leaf in traverse_util.flatten_dict(params).items():
        if path[-1] not in CONTRACTED:
            leaves[path] = leaf
        elif dtype == "int8":
            leaves[path], leaves[*path[:-1], SCALE] = _in_int8(leaf, CONTRACTED[path[-1]])
        else:
            weight = np.asarray(leaf, None if dtype == "stored" else jnp.dtype(dtype))
            leaves[path] = weight.view(np.uint16) if weight.dtype == BFLOAT16 else weight
    return traverse_util.unflatten_dict(leaves)


def as_float32(params: Any) -> Any:
    """Return the float32 values of frozen weights, as an ordinary model has them."""
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    for path in [path for path in leaves if path[-1] == SCALE]:
        scale = leaves.pop(path)
        name = next(name for name in CONTRACTED if (*path[:-1], name) in leaves)
        along = np.expand_dims(scale, CONTRACTED[name])
        leaves[*path[:-1], name] = leaves[*path[:-1], name].astype(np.float32) * along
    floats = {path: np.asarray(_of_bits(leaf), np.float32) for path, leaf in leaves.items()}
    return traverse_util.unflatten_dict(floats)


def _of_bits(leaf: np.ndarray) -> np.ndarray:
    return leaf.view(BFLOAT16) if leaf.dtype == np.uint16 else leaf


def type_of(params: Any) -> str:
    """Type of the matrices of a model: the first that is not float32, or float32."""
    types = {str(_of_bits(leaf).dtype) for leaf in jax.tree.leaves(params)} - {"float32"}
    return min(types, default="float32")


def _in_int8(weight: Any, contracted: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix rounded to int8, symmetrically about zero, and the scale of each output channel."""
    weight = np.asarray(weight, np.float32)
    largest = np.abs(weight).max(axis=contracted, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
    rounded = np.rint(weight / scale).astype(np.int8)
    return rounded, scale.squeeze(contracted)


class Dense(nn.Dense):
    """`nn.Dense` with a frozen kernel of any type."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        shape, dtype = (inputs.shape[-1], self.features), self.param_dtype
        kernel = self.param("kernel", self.kernel_init, shape, dtype)
        y = _multiplied(self, inputs, kernel, INPUTS)
        if not self.use_bias:
            return y
        bias = self.param("bias", self.bias_init, shape[1:], dtype).astype(y.dtype)
        return y + jnp.expand_dims(bias, range(y.ndim - 1))


class Embed(nn.Embed):
    """`nn.Embed` with a frozen embedding of any type."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        rows = _as(jnp.take(self.embedding, inputs, axis=0), self.dtype or jnp.float32)
        if (scale := self.get_variable("params", SCALE)) is None:
            return rows
        return rows * jnp.take(scale, inputs).astype(rows.dtype)[..., None]

    def attend(self, query: jax.Array) -> jax.Array:
        return _multiplied(self, query, self.embedding, OUTPUTS)


def _multiplied(module: Any, x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    scale = module.get_variable("params", SCALE)
    return product(x.astype(module.dtype or x.dtype), weight, scale, contracted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x: jax.Array, weight: jax.Array, scale: jax.Array | None, contracted: int) -> jax.Array:
    """Contract the last axis of x with an axis of a frozen weight, and multiply by its scale.

    The weight has no gradient. The result has the type of x. Terms are added in float32.
    """
    y = _dot(x, weight, contracted)
    return _scaled(y, scale).astype(x.dtype)


def _scaled(y: jax.Array, scale: jax.Array | None) -> jax.Array:
    return y if scale is None else y * jnp.expand_dims(scale, range(y.ndim - 1))


def _dot(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    if weight.dtype != jnp.float32:
        # This ties the conversion to x: XLA would move it, and a float32 copy of every weight, out
        # of the loops around it.
        x, weight = jax.lax.optimization_barrier((x, weight))
    dimensions = (((x.ndim - 1,), (contracted,)), ((), ()))
    at_least_float32 = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.dot_general(
        x, _as(weight, x.dtype), dimensions, preferred_element_type=at_least_float32
    )


def _as(weight: jax.Array, dtype: Any) -> jax.Array:
    """Convert a weight, or rows of it, to the type of a computation, without its scale."""
    if weight.dtype == jnp.uint16:
        weight = jax.lax.bitcast_convert_type(weight, jnp.bfloat16)
    return weight.astype(dtype)


def _forward(x, weight, scale, contracted):
    return product(x, weight, scale, contracted), (weight, scale)


def _backward(contracted, residuals, g):
    weight, scale = residuals
    of_x = _dot(_scaled(g, scale).astype(g.dtype), weight, 1 - contracted)
    return of_x.astype(g.dtype), None, None


product.defvjp(_forward, _backward)
